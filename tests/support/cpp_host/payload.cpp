// Reads payloads whose bytes were changed, and says how many are refused; built with sanitizers, which end it.
// Usage: payload <file> <seed> <count>
#include "../../../csrc/runtime/payload.h"

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>
#include <stdexcept>
#include <string>

#include "../../../csrc/model/file.cpp"
#include "../../../csrc/runtime/digest.cpp"
#include "../../../csrc/runtime/payload.cpp"

namespace {

// A bit flipped, a byte removed, a byte inserted, or everything after it cut off.
std::string changed(std::string content, std::mt19937& random) {
  const size_t at = random() % content.size();
  switch (random() % 4) {
    case 0: content[at] = static_cast<char>(content[at] ^ (1 << random() % 8)); break;
    case 1: content.erase(at, 1); break;
    case 2: content.insert(at, 1, static_cast<char>(random())); break;
    default: content.resize(at);
  }
  return content;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return std::fprintf(stderr, "usage: %s <file> <seed> <count>\n", argv[0]), 2;
  std::ifstream file(argv[1], std::ios::binary);
  const std::string content{std::istreambuf_iterator<char>(file), {}};
  std::mt19937 random(static_cast<unsigned>(std::atoi(argv[2])));
  int refused = 0, other_key = 0, native = 0;
  const int count = std::atoi(argv[3]);
  for (int number = 0; number < count; ++number) {
    const std::string bytes = changed(content, random);
    other_key += eqaccel::payload_key(bytes) != eqaccel::payload_key(content) || bytes == content;
    native += eqaccel::holds_native_code(bytes);
    try {
      eqaccel::read_numbers(eqaccel::read_entries(bytes).at("meta"));
    } catch (const std::invalid_argument&) {
      ++refused;
    }
  }
  std::printf("%d refused, %d have another key, %d hold machine code\n", refused, other_key, native);
  return 0;
}

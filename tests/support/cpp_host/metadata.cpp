// Reads descriptions of models, and prints for each what it says, or why it is refused.
// Usage: metadata <folder> <count>; the files are 0.bin, 1.bin, ...
#include "../../../csrc/model/metadata.h"

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <stdexcept>

#include "../../../csrc/model/json.cpp"
#include "../../../csrc/model/metadata.cpp"

int main(int argc, char** argv) {
  if (argc != 3) return std::fprintf(stderr, "usage: %s <folder> <count>\n", argv[0]), 2;
  for (int number = 0; number < std::atoi(argv[2]); ++number) {
    std::ifstream file(std::string(argv[1]) + "/" + std::to_string(number) + ".bin", std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    try {
      const eqaccel::ModelInfo info = eqaccel::read_metadata(text).info;
      std::printf("cutoff %g types %zu widths", info.cutoff, info.type_names.size());
      for (int64_t width : info.exchange_widths) std::printf(" %lld", static_cast<long long>(width));
      std::puts(info.is_double ? " double" : " single");
    } catch (const std::runtime_error& error) {
      std::string line = error.what();  // names of the description are in it, so line ends may be
      for (char& c : line)
        if (static_cast<unsigned char>(c) < ' ' || static_cast<unsigned char>(c) > '~') c = '?';
      std::printf("refused: %s\n", line.c_str());
    }
  }
  return 0;
}

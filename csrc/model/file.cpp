#include "file.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string_view>
#include <system_error>

#include "digest.h"

namespace eqaccel {
namespace {

// What stands before the digits at the end of a file, in the comment of the zip archive that it is.
constexpr std::string_view label = "eqaccel sha256 ";
constexpr size_t digits = 64;

bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '-'; }

// Moves past a word and the character after it; false if they are not there.
bool skip_word(const std::string& content, size_t& at, char after) {
  const size_t start = at;
  while (at < content.size() && is_word(content[at])) ++at;
  if (at == start || at == content.size() || content[at] != after) return false;
  ++at;
  return true;
}

}  // namespace

std::string read_exported(const std::string& path) {
  std::error_code error;
  std::string content(std::filesystem::is_regular_file(path, error) ? std::filesystem::file_size(path, error) : 0,
                      '\0');
  if (!error && std::filesystem::is_directory(path)) error = std::make_error_code(std::errc::is_a_directory);
  std::ifstream file(path, std::ios::binary);
  if (error || !file || !file.read(content.data(), static_cast<std::streamsize>(content.size()))) {
    throw std::runtime_error("can not be read: " + (error ? error.message() : std::string(std::strerror(errno))));
  }
  if (content.empty()) throw std::runtime_error("is empty: copy or export it again");
  const size_t hashed = content.size() - std::min(content.size(), digits);
  if (hashed < label.size() || content.compare(hashed - label.size(), label.size(), label) != 0) {
    throw std::runtime_error(
        "is incomplete, or was not written by this version of eqaccel.export: it does not end with a digest. Copy it "
        "again, or export the model again");
  }
  const std::string expected = content.substr(hashed);
  content.resize(hashed);
  if (sha256(content) != expected) {
    throw std::runtime_error("is damaged: it differs from what was written (SHA-256). Copy it or export it again");
  }
  return content;
}

// A precompiled kernel is an entry of a payload, "binary/<target>/<direction>/<dtype> <size>", after the line before it.
bool holds_native_code(const std::string& content) {
  const std::string start = "\nbinary/";
  for (size_t found = content.find(start); found != std::string::npos; found = content.find(start, found + 1)) {
    size_t at = found + start.size();
    bool whole = true;
    for (const char after : {'/', '/', ' '}) whole = whole && skip_word(content, at, after);
    if (whole) return true;
  }
  return false;
}

}  // namespace eqaccel

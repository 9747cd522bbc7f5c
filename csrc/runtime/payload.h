// Reading payloads, which come from files: whatever their bytes are, reading them ends in entries or in an error.
#pragma once
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace eqaccel {

std::invalid_argument bad_payload(const std::string& expected, const std::string& got);

// What eq_tables points to; empty where a kernel takes none.
struct Tables {
  std::vector<int64_t> integers;
  std::vector<double> reals;
};

// The entries of a payload, as program.h describes them. Throws std::invalid_argument.
std::map<std::string, std::string> read_entries(const std::string& payload);
// The family that the entry "meta" names, "" if none.
std::string read_family(const std::string& meta);
// The numbers of the entry "meta". Throws std::invalid_argument.
std::map<std::string, int64_t> read_numbers(const std::string& meta);

// Tables of a line of whole numbers and a line of others, or of no text. Throws std::invalid_argument.
Tables read_tables(const std::string& text);

// The key that names a payload: 63 bits of a digest of all of its bytes, as `payload_key` in eqaccel/codegen/payload.py.
int64_t payload_key(const std::string& payload);

}  // namespace eqaccel

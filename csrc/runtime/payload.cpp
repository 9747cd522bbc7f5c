#include "payload.h"

#include <locale>
#include <sstream>

#include "digest.h"

namespace eqaccel {
namespace {

constexpr char header[] = "EQACCEL-PAYLOAD 1\n";
constexpr char family_key[] = "family";

// A whole decimal number, or an exception that says where it stands.
int64_t read_number(const std::string& text, const std::string& where) {
  try {
    std::size_t end = 0;
    const int64_t number = std::stoll(text, &end);
    if (end == text.size()) return number;
  } catch (const std::exception&) {
  }
  throw bad_payload("a whole number in " + where, "'" + text + "'");
}

std::map<std::string, std::string> read_values(const std::string& meta) {
  std::map<std::string, std::string> values;
  std::istringstream lines(meta);
  for (std::string line; std::getline(lines, line);) {
    if (line.empty()) continue;
    const std::size_t equals = line.find('=');
    if (equals == std::string::npos) throw bad_payload("'key=value' in entry 'meta'", "'" + line + "'");
    values[line.substr(0, equals)] = line.substr(equals + 1);
  }
  return values;
}

}  // namespace

std::invalid_argument bad_payload(const std::string& expected, const std::string& got) {
  return std::invalid_argument("payload: expected " + expected + ", got " + got);
}

std::map<std::string, std::string> read_entries(const std::string& payload) {
  if (payload.rfind(header, 0) != 0) {
    const std::string start = payload.substr(0, payload.find('\n')).substr(0, sizeof(header));
    throw bad_payload("the line 'EQACCEL-PAYLOAD 1' at the start", "'" + start + "'");
  }
  std::map<std::string, std::string> entries;
  std::size_t position = sizeof(header) - 1;
  while (position < payload.size()) {
    const std::size_t line_end = payload.find('\n', position);
    if (line_end == std::string::npos) {
      throw bad_payload("the line '<name> <size>' at byte " + std::to_string(position), "the end of the payload");
    }
    const std::string line = payload.substr(position, line_end - position);
    const std::size_t space = line.find(' ');
    if (space == 0 || space == std::string::npos) throw bad_payload("the line '<name> <size>'", "'" + line + "'");
    const std::string name = line.substr(0, space);
    const int64_t size = read_number(line.substr(space + 1), "the size of entry '" + name + "'");
    const std::size_t left = payload.size() - line_end - 1;
    if (size < 0 || uint64_t(size) >= left) {
      throw bad_payload(std::to_string(size) + " bytes and a newline for entry '" + name + "'",
                        std::to_string(left) + " bytes");
    }
    if (payload[line_end + 1 + size] != '\n') {
      throw bad_payload("a newline after entry '" + name + "'", "another character: its size is wrong");
    }
    entries[name] = payload.substr(line_end + 1, size);
    position = line_end + 2 + size;
  }
  if (!entries.count("meta")) throw bad_payload("an entry 'meta'", std::to_string(entries.size()) + " other entries");
  return entries;
}

std::string read_family(const std::string& meta) {
  const auto values = read_values(meta);
  const auto found = values.find(family_key);
  return found == values.end() ? "" : found->second;
}

std::map<std::string, int64_t> read_numbers(const std::string& meta) {
  std::map<std::string, int64_t> numbers;
  for (const auto& [key, value] : read_values(meta))
    if (key != family_key) numbers[key] = read_number(value, "meta '" + key + "'");
  return numbers;
}

Tables read_tables(const std::string& text) {
  Tables tables;
  std::istringstream lines(text);
  std::string integers, reals, word;
  std::getline(lines, integers);
  std::getline(lines, reals);
  std::istringstream whole(integers), others(reals);
  while (whole >> word) tables.integers.push_back(read_number(word, "tables"));
  others.imbue(std::locale::classic());
  for (double real = 0; others >> real;) tables.reals.push_back(real);
  if (!others.eof()) throw bad_payload("numbers in tables", "'" + reals + "'");
  return tables;
}

int64_t payload_key(const std::string& payload) {
  return static_cast<int64_t>(std::stoull(sha256(payload).substr(0, 16), nullptr, 16) >> 1);
}

}  // namespace eqaccel

// The disk cache of compiled kernels.
//
// Folder: EQACCEL_CACHE_DIR, else XDG_CACHE_HOME/eqaccel, else HOME/.cache/eqaccel, read at every call. An entry is one
// file "<key><suffix>": the compiled code, the compile log, and a trailer with their sizes and checksum. The trailer
// comes last so that a CPU entry is still a shared library that dlopen accepts. Entries are written under a temporary
// name and renamed, so there is no lock to be left behind and a reader never sees half an entry; of two writers of one
// key the last wins, with equal content.
#pragma once
#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

namespace eqaccel::cache {

struct Entry {
  std::string code;
  std::string log;
};

// SHA-256 over the parts, each preceded by its length, cut to 40 digits.
std::string key(std::initializer_list<std::string> parts);

std::string folder();  // "" if no variable is set and the user has no home
std::string path(const std::string& name);

// The entry, or nothing if it is absent or damaged. Counts a hit or a miss.
std::optional<Entry> read(const std::string& name);
// Stores an entry; warns once and returns false if the folder can not be written.
bool write(const std::string& name, const Entry&);

struct Stats {
  int64_t hits, misses;
};
Stats stats();

// A folder of its own for one compilation, in the cache folder if possible, else in TMPDIR or /tmp; removed with its
// content at the end of its life. What a killed process leaves behind in the cache folder is removed after a day.
class Scratch {
 public:
  Scratch();
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::string read_file(const std::string& path);  // throws std::runtime_error
void write_file(const std::string& path, const std::string& content);

}  // namespace eqaccel::cache

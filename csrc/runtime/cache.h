// The disk cache of compiled kernels, and of small files beside them.
//
// Folder: EQACCEL_CACHE_DIR, else XDG_CACHE_HOME/eqaccel, else HOME/.cache/eqaccel, read at every call. An entry is one
// file: the compiled code, the compile log, and a trailer with their sizes and checksum. Files are written under a
// temporary name and renamed, so a reader never sees half an entry; of two writers of one name the last wins, with equal
// content. The folder and its files are used only if they are trusted (trust.h). What can not be read or written is
// done without, and one warning in the life of the process says why.
#pragma once
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "scratch.h"

namespace eqaccel::cache {

struct Entry {
  std::string code;
  std::string log;
};

// SHA-256 over the parts, each preceded by its length, cut to 40 digits.
std::string key(std::initializer_list<std::string> parts);

std::string folder();  // "" if no variable is set and the user has no home
std::string path(const std::string& name);
// Why the folder is not used, "" if it is, or if there is none yet.
std::string problem();
// The folder, made if need be; "" if it can not be used.
std::string writable_folder();

// The entry, or nothing if it is absent, damaged or not trusted.
std::optional<Entry> read(const std::string& name);
// Stores an entry, then removes those that were not used for longest if the cache exceeds its limit. Returns false if
// that is not possible; `warns` says whether somebody has to know.
bool write(const std::string& name, const Entry&, bool warns = true);
// Of the entries whose names begin and end so, the one that was written last; "" if there is none.
std::string newest(const std::string& start, const std::string& end);

// Files that are not entries, as they are. Both set `problem` where a file is not there for another reason than that
// nobody wrote it, or can not be written, and leave the warning to the caller.
std::optional<std::string> read_bytes(const std::string& name, std::string& problem);
bool write_bytes(const std::string& name, const std::string& content, std::string& problem);

struct File {
  std::string name;
  int64_t bytes;
  double used, written;  // seconds since 1970
};
std::vector<File> files();  // regular files, not in order
bool remove(const std::string& name);

struct Stats {
  int64_t hits, misses;
};
Stats stats();
void count(bool hit);  // a kernel that was asked for

// Held by the one process, or thread, that makes an entry while the others wait for it. The lock ends with the process
// that holds it. Where there are none (no folder, a file system without locks) everybody makes the entry.
class Lock {
 public:
  // Waits, at most ten minutes: a process may be stopped. Throws InterruptedError if it is to end meanwhile.
  explicit Lock(const std::string& name);
  ~Lock();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace eqaccel::cache

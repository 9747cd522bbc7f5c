#include "cache.h"

#include <dirent.h>
#include <fcntl.h>
#include <pwd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <random>
#include <stdexcept>

#include "diagnostics.h"
#include "digest.h"
#include "settings.h"
#include "trust.h"

namespace eqaccel::cache {
namespace {

constexpr char magic[] = "EQACCEL-ENTRY-1\n";
constexpr std::size_t digest_size = 64;  // of SHA-256, in hexadecimal digits
constexpr std::size_t trailer_size = 2 * sizeof(uint64_t) + digest_size + sizeof(magic) - 1;
constexpr double hour = 3600;  // seconds

std::atomic<int64_t> hits{0}, misses{0};

std::string bytes_of(uint64_t number) { return std::string(reinterpret_cast<const char*>(&number), sizeof number); }

uint64_t number_at(const std::string& text, std::size_t position) {
  uint64_t number;
  std::memcpy(&number, text.data() + position, sizeof number);
  return number;
}

// code, log, code size, log size, digest of the four, magic
std::string pack(const Entry& entry) {
  std::string text = entry.code + entry.log + bytes_of(entry.code.size()) + bytes_of(entry.log.size());
  return text + sha256(text) + magic;
}

std::optional<Entry> unpack(const std::string& text) {
  if (text.size() < trailer_size) return {};
  const std::size_t trailer = text.size() - trailer_size;
  const std::size_t digest = trailer + 2 * sizeof(uint64_t);
  if (text.compare(digest + digest_size, std::string::npos, magic) != 0) return {};
  const uint64_t code_size = number_at(text, trailer), log_size = number_at(text, trailer + sizeof(uint64_t));
  if (code_size > trailer || log_size != trailer - code_size) return {};
  if (text.compare(digest, digest_size, sha256(text.substr(0, digest))) != 0) return {};
  return Entry{text.substr(0, code_size), text.substr(code_size, log_size)};
}

double seconds(const timespec& time) { return double(time.tv_sec) + 1e-9 * double(time.tv_nsec); }

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), std::string::npos, end) == 0;
}

bool is_entry(const std::string& name) {
  return ends_with(name, ".so") || ends_with(name, ".bin") || ends_with(name, ".ok");
}

// Names come from this library and from Python: none leads out of the folder.
void check_name(const std::string& name) {
  if (name.empty() || name.find('/') != std::string::npos || name == "." || name == "..") {
    throw std::invalid_argument("name: expected the name of a file in the cache folder, got '" + name + "'");
  }
}

void warn_unused(const std::string& problem) {
  warn_once("cache", "the cache of compiled kernels is not used: " + problem +
                         ". Mend that, or set EQACCEL_CACHE_DIR to "
                         "a folder of your own.");
}

std::string refused(const std::string& path, const std::string& reason) {
  return "'" + path + "' is refused (" + reason + ")";
}

// The folder, if there is one that is trusted; else sets `problem`, unless there is none.
Descriptor open_folder(std::string& problem) {
  const std::string path = folder();
  if (path.empty()) return Descriptor();
  std::string reason;
  Descriptor opened = open_trusted_folder(path, reason);
  if (!reason.empty()) problem = refused(path, reason);
  return opened;
}

// Makes the folder and those above it, for this user only as the XDG specification asks.
void make_folders(const std::string& path) {
  for (std::size_t end = path.find('/', 1);; end = path.find('/', end + 1)) {
    mkdir(path.substr(0, end).c_str(), 0700);
    if (end == std::string::npos) return;
  }
}

// A trusted folder that files can be made in; else sets `problem`.
Descriptor make_folder(std::string& problem) {
  const std::string path = folder();
  if (path.empty()) {
    problem = "the user has no home";
    return Descriptor();
  }
  make_folders(path);
  const int error = errno;
  Descriptor opened = open_folder(problem);
  if (!opened && problem.empty()) problem = "'" + path + "' (" + std::strerror(error) + ")";
  return opened;
}

std::string temporary_name() {
  std::random_device random;
  char digits[17];
  std::snprintf(digits, sizeof digits, "%08x%08x", unsigned(random()), unsigned(random()));
  return temporary_prefix + std::string(digits);
}

// Writes under another name, then renames; leaves errno if that fails.
bool replace_file(const Descriptor& folder, const std::string& name, const std::string& content) {
  const std::string temporary = temporary_name();
  const int number = openat(folder.number(), temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (number < 0) return false;
  bool written = fchmod(number, 0644) == 0;  // others may read, as in a folder that many users share, but never write
  {
    const Descriptor file(number);
    written = write_all(file, content) && written;
  }
  if (written && renameat(folder.number(), temporary.c_str(), folder.number(), name.c_str()) == 0) return true;
  const int error = errno;
  unlinkat(folder.number(), temporary.c_str(), 0);
  errno = error;
  return false;
}

// Removes entries, those that were not used for longest first, until the rest is within the limit. Safe beside other
// processes: they have read an entry whole, or find none.
void trim(int64_t most) {
  if (most == 0) return;
  std::vector<File> entries;
  int64_t total = 0;
  for (File& file : files()) {
    if (!is_entry(file.name)) continue;
    total += file.bytes;
    entries.push_back(std::move(file));
  }
  if (total <= most) return;
  std::sort(entries.begin(), entries.end(), [](const File& a, const File& b) { return a.used < b.used; });
  for (const File& file : entries) {
    if (total <= most) return;
    if (remove(file.name)) total -= file.bytes;
  }
}

}  // namespace

std::string key(std::initializer_list<std::string> parts) {
  std::string text;
  for (const std::string& part : parts) text += std::to_string(part.size()) + ":" + part;
  return sha256(text).substr(0, 40);
}

std::string folder() {
  std::string home = environment("HOME");
  if (const passwd* user = home.empty() ? getpwuid(getuid()) : nullptr) home = user->pw_dir;
  // "~" reaches us where no shell has expanded it: Dockerfiles, job managers.
  const auto expand = [&](const std::string& path) { return path.rfind("~/", 0) == 0 ? home + path.substr(1) : path; };
  if (const std::string value = settings::cache_dir(); !value.empty()) return expand(value);
  if (const std::string value = environment("XDG_CACHE_HOME"); !value.empty()) return expand(value) + "/eqaccel";
  return home.empty() ? "" : home + "/.cache/eqaccel";
}

std::string path(const std::string& name) { return folder() + "/" + name; }

std::string problem() {
  std::string problem;
  open_folder(problem);
  return problem;
}

std::string writable_folder() {
  std::string problem;
  return make_folder(problem) ? folder() : "";
}

std::optional<std::string> read_bytes(const std::string& name, std::string& problem) {
  check_name(name);
  const Descriptor folder = open_folder(problem);
  if (!folder) return {};
  std::string reason;
  std::optional<std::string> content;
  if (const Descriptor file = open_trusted_file(folder, name, O_RDONLY, reason)) {
    content = read_all(file, reason);
    // When it was used last; a folder that is read-only forgets it.
    struct stat info;
    const timespec now_and_as_before[] = {{0, UTIME_NOW}, {0, UTIME_OMIT}};
    if (fstat(file.number(), &info) == 0 && double(std::time(nullptr)) - seconds(info.st_atim) > hour) {
      (void)futimens(file.number(), now_and_as_before);
    }
  }
  if (!reason.empty()) problem = refused(path(name), reason);
  return content;
}

std::optional<Entry> read(const std::string& name) {
  std::string problem;
  const std::optional<std::string> content = read_bytes(name, problem);
  if (!problem.empty()) warn_unused(problem);
  return content ? unpack(*content) : std::nullopt;
}

bool write_bytes(const std::string& name, const std::string& content, std::string& problem) {
  check_name(name);
  const Descriptor folder = make_folder(problem);
  if (!folder) return false;
  if (replace_file(folder, name, content)) return true;
  problem = "'" + path(name) + "' (" + std::strerror(errno) + ")";
  return false;
}

bool write(const std::string& name, const Entry& entry, bool warns) {
  const int64_t most = settings::cache_limit();
  std::string problem;
  if (write_bytes(name, pack(entry), problem)) {
    trim(most);
    return true;
  }
  if (warns) {
    warn_once("cache", "compiled kernels are not kept: can not write to the cache folder: " + problem +
                           ". Set EQACCEL_CACHE_DIR to a folder that can be written.");
  }
  return false;
}

std::string newest(const std::string& start, const std::string& end) {
  File found{"", 0, 0, 0};
  for (File& file : files()) {
    const bool fits = file.name.rfind(start, 0) == 0 && ends_with(file.name, end);
    if (fits && (found.name.empty() || file.written > found.written)) found = std::move(file);
  }
  return found.name;
}

std::vector<File> files() {
  std::vector<File> found;
  std::string problem;
  const Descriptor folder = open_folder(problem);
  if (!problem.empty()) warn_unused(problem);
  DIR* const listing = folder ? fdopendir(dup(folder.number())) : nullptr;
  if (!listing) return found;
  while (const dirent* item = readdir(listing)) {
    struct stat info;
    if (fstatat(folder.number(), item->d_name, &info, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISREG(info.st_mode)) continue;
    const double written = seconds(info.st_mtim);
    found.push_back({item->d_name, info.st_size, std::max(written, seconds(info.st_atim)), written});
  }
  closedir(listing);
  return found;
}

bool remove(const std::string& name) {
  check_name(name);
  std::string problem;
  const Descriptor folder = open_folder(problem);
  return folder && unlinkat(folder.number(), name.c_str(), 0) == 0;
}

void count(bool hit) { ++(hit ? hits : misses); }

Stats stats() { return {hits.load(), misses.load()}; }

}  // namespace eqaccel::cache

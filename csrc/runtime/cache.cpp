#include "cache.h"

#include <pwd.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <vector>

#include "diagnostics.h"
#include "digest.h"

namespace eqaccel::cache {
namespace {

namespace fs = std::filesystem;

constexpr char magic[] = "EQACCEL-ENTRY-1\n";
constexpr char temporary_prefix[] = ".tmp-";
constexpr std::size_t digest_size = 64;
constexpr std::size_t trailer_size = 2 * sizeof(uint64_t) + digest_size + sizeof(magic) - 1;

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

void remove_stale(const std::string& folder) {
  std::error_code error;
  const auto now = fs::file_time_type::clock::now();
  for (fs::directory_iterator item(folder, error), end; !error && item != end; item.increment(error)) {
    if (item->path().filename().string().rfind(temporary_prefix, 0) != 0) continue;
    std::error_code ignored;
    const auto written = fs::last_write_time(item->path(), ignored);
    if (!ignored && now - written > std::chrono::hours(24)) fs::remove_all(item->path(), ignored);
  }
}

// A new private folder inside `parent`, "" if that is not possible.
std::string make_temporary_folder(const std::string& parent) {
  std::string pattern = parent + "/" + temporary_prefix + "XXXXXX";
  return mkdtemp(pattern.data()) ? pattern : "";
}

// Makes the cache folder, for this user only as the XDG specification asks.
bool make_folder(const std::string& folder) {
  std::error_code error;
  const bool made = fs::create_directories(folder, error);
  if (made) fs::permissions(folder, fs::perms::owner_all, error);
  return fs::is_directory(folder, error);
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
  if (const std::string value = environment("EQACCEL_CACHE_DIR"); !value.empty()) return expand(value);
  if (const std::string value = environment("XDG_CACHE_HOME"); !value.empty()) return expand(value) + "/eqaccel";
  return home.empty() ? "" : home + "/.cache/eqaccel";
}

std::string path(const std::string& name) { return folder() + "/" + name; }

std::optional<Entry> read(const std::string& name) {
  std::optional<Entry> entry;
  if (!folder().empty()) {
    std::ifstream file(path(name), std::ios::binary);
    if (file) entry = unpack(std::string(std::istreambuf_iterator<char>(file), {}));
  }
  ++(entry ? hits : misses);
  return entry;
}

bool write(const std::string& name, const Entry& entry) {
  const std::string parent = folder();
  std::string problem = "the user has no home";
  if (!parent.empty()) {
    errno = 0;
    const std::string scratch = make_folder(parent) ? make_temporary_folder(parent) : "";
    if (!scratch.empty()) {
      std::error_code error;
      try {
        write_file(scratch + "/entry", pack(entry));
        fs::rename(scratch + "/entry", path(name), error);
      } catch (const std::runtime_error&) {
        error = std::error_code(errno, std::generic_category());
      }
      std::error_code ignored;
      fs::remove_all(scratch, ignored);
      if (!error) return true;
      problem = error.message();
    } else {
      problem = errno ? std::strerror(errno) : "not a folder";
    }
  }
  warn_once("cache", "compiled kernels are not kept: can not write to the cache folder '" + parent + "' (" + problem +
                         "). Set EQACCEL_CACHE_DIR to a folder that can be written.");
  return false;
}

Stats stats() { return {hits.load(), misses.load()}; }

Scratch::Scratch() {
  const std::string cache = folder();
  std::vector<std::string> parents;
  if (!cache.empty() && make_folder(cache)) {
    remove_stale(cache);
    parents.push_back(cache);
  }
  if (const std::string temporary = environment("TMPDIR"); !temporary.empty()) parents.push_back(temporary);
  parents.push_back("/tmp");
  for (const std::string& parent : parents) {
    path_ = make_temporary_folder(parent);
    if (!path_.empty()) return;
  }
  throw std::runtime_error("no folder can be written: tried the cache folder '" + cache + "', TMPDIR and /tmp");
}

Scratch::~Scratch() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("can not read '" + path + "'");
  return std::string(std::istreambuf_iterator<char>(file), {});
}

void write_file(const std::string& path, const std::string& content) {
  std::ofstream file(path, std::ios::binary);
  file << content;
  file.flush();
  if (!file) throw std::runtime_error("can not write '" + path + "'");
}

}  // namespace eqaccel::cache

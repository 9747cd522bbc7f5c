#include "scratch.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <vector>

#include "cache.h"
#include "program.h"
#include "settings.h"
#include "trust.h"

namespace eqaccel::cache {
namespace {

namespace fs = std::filesystem;

// More than the source, the library and the messages of any kernel take.
constexpr std::size_t room = std::size_t(4) << 20;

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

// A new private folder inside `parent`; "" if that is not possible, or if there is no room in it: a disk or a quota
// that is full lets folders be made and then refuses every byte.
std::string make_folder_with_room(const std::string& parent) {
  std::string path = parent + "/" + temporary_prefix + "XXXXXX";
  if (!mkdtemp(path.data())) return "";
  const std::string probe = path + "/probe";
  int reason = 0;
  {
    const Descriptor file(open(probe.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    if (!file || !write_all(file, std::string(room, '\0'))) reason = errno;
  }
  std::error_code ignored;
  fs::remove(probe, ignored);
  if (reason == 0) return path;
  fs::remove_all(path, ignored);
  errno = reason;
  return "";
}

[[noreturn]] void fail(const std::string& what, const std::string& path) {
  const std::string reason = std::strerror(errno);
  throw CompileError("can not " + what + " '" + path + "' (" + reason +
                         ") while compiling a kernel: make room there, "
                         "or set EQACCEL_CACHE_DIR or TMPDIR to another folder",
                     "");
}

}  // namespace

Scratch::Scratch() {
  std::vector<std::string> parents;
  if (const std::string cache = writable_folder(); !cache.empty()) {
    remove_stale(cache);
    parents.push_back(cache);
  }
  if (const std::string temporary = environment("TMPDIR"); !temporary.empty()) parents.push_back(temporary);
  for (const char* folder : {"/tmp", "/dev/shm"}) parents.push_back(folder);
  std::string tried;
  for (const std::string& parent : parents) {
    path_ = make_folder_with_room(parent);
    if (!path_.empty()) return;
    tried += (tried.empty() ? "'" : ", '") + parent + "' (" + std::strerror(errno) + ")";
  }
  throw CompileError("there is no room to compile a kernel: tried " + tried +
                         ". Set TMPDIR to a folder with some "
                         "megabytes of room",
                     "");
}

Scratch::~Scratch() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

std::string read_file(const std::string& path) {
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  std::string problem;
  if (!file) fail("read", path);
  std::optional<std::string> content = read_all(file, problem);
  if (!content) fail("read", path);
  return std::move(*content);
}

void write_file(const std::string& path, const std::string& content) {
  const Descriptor file(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  if (!file || !write_all(file, content)) fail("write", path);
}

}  // namespace eqaccel::cache

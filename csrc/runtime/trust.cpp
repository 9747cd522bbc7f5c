#include "trust.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

namespace eqaccel {
namespace {

constexpr off_t largest_file = off_t(1) << 30;  // a kernel has some 100 kB: what is larger is no entry of a cache

std::string kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a folder";
  if (S_ISFIFO(mode)) return "a pipe";
  if (S_ISSOCK(mode)) return "a socket";
  return S_ISCHR(mode) || S_ISBLK(mode) ? "a device" : "not a regular file";
}

}  // namespace

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  std::swap(number_, other.number_);
  return *this;
}

Descriptor::~Descriptor() {
  if (number_ >= 0) close(number_);
}

std::string distrust(const struct stat& info) {
  if (info.st_uid != geteuid() && info.st_uid != 0) {
    return "it belongs to user " + std::to_string(info.st_uid) + ", who is neither you nor root";
  }
  if (info.st_mode & S_IWOTH) return "every user can write it: chmod go-w";
  if (info.st_mode & S_IWGRP) return "its group can write it: chmod g-w";
  return "";
}

std::string distrust_path(const std::string& path) {
  std::error_code error;
  const std::filesystem::path real = std::filesystem::canonical(path, error);
  if (error) return "'" + path + "': " + error.message();
  for (std::filesystem::path part = real;; part = part.parent_path()) {
    struct stat info;
    if (stat(part.c_str(), &info) != 0) return "'" + part.string() + "': " + std::strerror(errno);
    const bool sticky = part != real && S_ISDIR(info.st_mode) && info.st_mode & S_ISVTX;
    if (sticky) info.st_mode &= ~mode_t(S_IWGRP | S_IWOTH);
    if (const std::string reason = distrust(info); !reason.empty()) return "'" + part.string() + "': " + reason;
    if (part == part.root_path()) return "";
  }
}

Descriptor open_trusted_folder(const std::string& path, std::string& problem) {
  Descriptor folder(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  struct stat info;
  if (!folder || fstat(folder.number(), &info) != 0) {
    if (errno != ENOENT) problem = std::strerror(errno);
    return Descriptor();
  }
  problem = distrust(info);
  return problem.empty() ? std::move(folder) : Descriptor();
}

Descriptor open_trusted_file(const Descriptor& folder, const std::string& name, int flags, std::string& problem) {
  // Nobody else may write what this makes, whatever the user's mask: it would not be trusted.
  Descriptor file(openat(folder.number(), name.c_str(), flags | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600));
  struct stat info;
  if (!file || fstat(file.number(), &info) != 0) {
    if (errno != ENOENT) problem = errno == ELOOP ? "it is a symbolic link" : std::strerror(errno);
    return Descriptor();
  }
  if (!S_ISREG(info.st_mode)) problem = "it is " + kind_of(info.st_mode);
  else problem = distrust(info);
  return problem.empty() ? std::move(file) : Descriptor();
}

std::optional<std::string> read_all(const Descriptor& file, std::string& problem) {
  struct stat info;
  if (fstat(file.number(), &info) != 0) {
    problem = std::strerror(errno);
    return {};
  }
  if (info.st_size > largest_file) {
    problem = "it has " + std::to_string(info.st_size) + " bytes";
    return {};
  }
  std::string content(static_cast<std::size_t>(info.st_size), '\0');
  std::size_t count = 0;
  while (count < content.size()) {
    const ssize_t got = read(file.number(), content.data() + count, content.size() - count);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      problem = std::strerror(errno);
      return {};
    }
    if (got == 0) break;  // cut short meanwhile
    count += static_cast<std::size_t>(got);
  }
  content.resize(count);
  return content;
}

bool write_all(const Descriptor& file, const std::string& content) {
  std::size_t count = 0;
  while (count < content.size()) {
    const ssize_t put = write(file.number(), content.data() + count, content.size() - count);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return false;
    count += static_cast<std::size_t>(put);
  }
  return true;
}

}  // namespace eqaccel

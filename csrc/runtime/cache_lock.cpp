// The lock under which one process makes an entry of the cache: a byte of the file ".lock", so that there is one file for
// all entries and nothing to clean up. The lock belongs to the open file, and the kernel drops it when a process ends,
// however it does.
#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <string>
#include <thread>

#include "cache.h"
#include "digest.h"
#include "process.h"
#include "program.h"
#include "trust.h"

namespace eqaccel::cache {
namespace {

constexpr auto longest_wait = std::chrono::minutes(10);

// False while somebody else holds the byte. True also where the file system knows no locks.
bool lock_byte(const Descriptor& file, off_t byte) {
  struct flock area{};
  area.l_type = F_WRLCK;
  area.l_whence = SEEK_SET;
  area.l_start = byte;
  area.l_len = 1;
  return fcntl(file.number(), F_OFD_SETLK, &area) == 0 || (errno != EAGAIN && errno != EACCES && errno != EINTR);
}

}  // namespace

struct Lock::State {
  Descriptor file;
};

Lock::Lock(const std::string& name) : state_(std::make_unique<State>()) {
  const std::string path = writable_folder();
  std::string problem;
  const Descriptor folder = path.empty() ? Descriptor() : open_trusted_folder(path, problem);
  if (!folder) return;
  state_->file = open_trusted_file(folder, ".lock", O_RDWR | O_CREAT, problem);
  if (!state_->file) return;
  const off_t byte = std::stoll(sha256(name).substr(0, 15), nullptr, 16);
  const InterruptWatch interrupt;
  const auto start = std::chrono::steady_clock::now();
  auto pause = std::chrono::milliseconds(5);
  while (!lock_byte(state_->file, byte) && std::chrono::steady_clock::now() - start < longest_wait) {
    if (interrupt.noticed())
      throw InterruptedError("waiting for another process, which compiles this too, was interrupted", "");
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, std::chrono::milliseconds(100));
  }
}

Lock::~Lock() = default;

}  // namespace eqaccel::cache

// Thin access to the CUDA driver (libcuda) and to HIP (libamdhip64), opened at run time.
//
// The two have the same functions under other names, so one class serves both. Errors are std::runtime_error with the
// driver's own name for them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include "program.h"

namespace eqaccel {

struct Dim3 {
  unsigned x = 1, y = 1, z = 1;
};

// The parts of some size that it takes to cover so many.
inline int64_t ceil_div(int64_t count, int64_t size) { return (count + size - 1) / size; }

struct DeviceInfo {
  std::string name;
  std::string arch;  // "sm_90", "gfx90a:sramecc+:xnack-"
  int multiprocessors;
  int warp_size;
  int shared_bytes_per_block;  // the most a kernel may ask for, opt-in included, or less if a setting says so
  int device_shared_bytes_per_block, shared_bytes_per_multiprocessor;  // whatever settings say
  int registers_per_multiprocessor;
  std::size_t memory_bytes;
  bool launches_early;  // whether a kernel may begin before the one before it has ended
};

class GpuDriver {
 public:
  using Module = void*;
  using Function = void*;

  // The driver of a backend; throws std::runtime_error saying why there is none.
  static const GpuDriver& get(Backend);
  // How many devices there are; 0 rather than an error if there is no driver.
  static int device_count(Backend);

  Backend backend() const { return backend_; }
  const DeviceInfo& device(int) const;  // read once, then kept
  std::string arch(int device) const { return this->device(device).arch; }
  int current_device() const;  // of the calling thread; -1 if it has none yet

  // The module lives until the process ends. `binary` is what compile_gpu gives.
  Module load_module(const std::string& binary, int device) const;
  Function get_function(Module, const char* name) const;
  // Lets a kernel use more dynamic shared memory than the default 48 KiB. Nothing to do on AMD.
  void set_shared_bytes(Function, int bytes) const;
  // Blocks of a kernel that one multiprocessor holds at a time.
  int resident_blocks(Function, int threads, std::size_t shared_bytes) const;
  // The caller holds a DeviceScope for the device of the function.
  void launch(Function, Dim3 grid, Dim3 block, unsigned shared_bytes, void* stream, void** parameters) const;
  // The same on a device that launches early: the kernel may begin while the last one on the stream still runs, and has
  // to wait for its end itself.
  void launch_early(Function, Dim3 grid, Dim3 block, unsigned shared_bytes, void* stream, void** parameters) const;
  void fill_zero(void* pointer, std::size_t bytes, void* stream) const;
  // Whether what is put on a stream of a device is recorded into a graph.
  bool is_capturing(void* stream, int device) const;

 private:
  friend class DeviceScope;
  explicit GpuDriver(Backend);
  void check(int status, const char* what) const;
  DeviceInfo read_device(int) const;
  void* context(int device) const;  // CUDA: the primary context, the one that torch uses too

  Backend backend_;
  struct Table;
  Table* table_;
};

// Makes a device current on this thread while it lives. Costs next to nothing when it is current already.
class DeviceScope {
 public:
  DeviceScope(const GpuDriver&, int device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  const GpuDriver& driver_;
  int previous_ = -1;     // HIP: the device to go back to
  bool changed_ = false;  // whether there is something to undo
};

}  // namespace eqaccel

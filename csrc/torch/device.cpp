#include "device.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

#include "gpu_driver.h"

namespace eqaccel {
namespace {

// What the GPU half of torch offers without its headers: which half it is, and a C entry point for its streams.
struct GpuLibrary {
  Backend backend = Backend::cuda;
  int32_t (*current_stream)(int32_t device, void** stream) = nullptr;
};

GpuLibrary find_gpu_library() {
  // RTLD_NOLOAD: torch has loaded its GPU half before the first GPU tensor exists, though not for global look-up.
  const std::pair<const char*, Backend> halves[] = {{"libtorch_hip.so", Backend::hip},
                                                    {"libtorch_cuda.so", Backend::cuda}};
  GpuLibrary library;
  for (const auto& [file, backend] : halves) {
    void* handle = dlopen(file, RTLD_LAZY | RTLD_NOLOAD);
    if (handle == nullptr) continue;
    library.backend = backend;
    library.current_stream =
        reinterpret_cast<decltype(library.current_stream)>(dlsym(handle, "aoti_torch_get_current_cuda_stream"));
    break;
  }
  return library;
}

const GpuLibrary& gpu_library() {
  static const GpuLibrary library = find_gpu_library();
  return library;
}

}  // namespace

Backend backend_of(c10::Device device) { return device.is_cpu() ? Backend::cpu : gpu_library().backend; }

void* current_stream(c10::Device device) {
  if (device.is_cpu()) return nullptr;
  const auto query = gpu_library().current_stream;
  void* stream = nullptr;
  TORCH_CHECK(query != nullptr && query(device.index(), &stream) == 0,
              "eqaccel: cannot ask torch for the current stream of ", device,
              ": expected libtorch_cuda or libtorch_hip to be loaded and to export "
              "aoti_torch_get_current_cuda_stream. Use torch 2.10 or newer with GPU support.");
  return stream;
}

bool is_capturing(c10::Device device) {
  return !device.is_cpu() && GpuDriver::get(backend_of(device)).is_capturing(current_stream(device), device.index());
}

}  // namespace eqaccel

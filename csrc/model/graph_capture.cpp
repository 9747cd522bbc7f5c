#include "graph_capture.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

namespace eqaccel {
namespace {

using NewRecorder = decltype(&eqaccel_new_recorder);

struct Library {
  NewRecorder new_recorder = nullptr;
  std::string failure;
};

// Opened only where a GPU is used, because it needs the GPU half of torch.
const Library& library() {
  static const Library opened = [] {
    Library result;
    if (void* handle = dlopen("libeqaccel_capture.so", RTLD_NOW | RTLD_LOCAL))
      result.new_recorder = reinterpret_cast<NewRecorder>(dlsym(handle, "eqaccel_new_recorder"));
    if (!result.new_recorder) result.failure = dlerror();
    return result;
  }();
  return opened;
}

}  // namespace

std::string GraphCapture::obstacle(c10::Device device) {
  if (device.is_cpu()) return "on a CPU";
  if (library().new_recorder) return "";
  return "eqaccel was built without CUDA's headers (cuda_runtime_api.h), which torch needs for it: install it again where "
         "they are (" +
         library().failure + ")";
}

GraphCapture::GraphCapture(const std::function<void()>& body) {
  TORCH_CHECK(library().new_recorder, library().failure);
  recorder_.reset(library().new_recorder());
  recorder_->begin();
  try {
    body();
  } catch (...) {
    try {
      recorder_->end();
    } catch (const std::exception&) {  // of what `body` did, which its own error tells better
    }
    throw;
  }
  recorder_->end();
}

}  // namespace eqaccel

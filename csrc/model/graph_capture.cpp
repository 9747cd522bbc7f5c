#include "graph_capture.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

#if __has_include(<ATen/core/GraphImplInterface.h>)  // torch 2.13 and later
#include <ATen/core/GraphImplInterface.h>
#define EQ_TORCH_RECORDS 1
#endif

namespace eqaccel {
namespace {

#ifdef EQ_TORCH_RECORDS

class TorchRecorder final : public Recorder {
 public:
  explicit TorchRecorder(c10::Device device) : graph_(at::create_graph_impl(device.type())) {}
  // Other threads may use the device meanwhile.
  void begin() override { graph_->capture_begin({0, 0}, at::GraphCaptureMode::ThreadLocal); }
  void end() override { graph_->capture_end(); }
  void replay() override { graph_->replay(); }

 private:
  std::unique_ptr<at::GraphImplInterface> graph_;
};

bool torch_records(c10::Device device) { return at::has_graph_impl(device.type()); }
std::unique_ptr<Recorder> torch_recorder(c10::Device device) { return std::make_unique<TorchRecorder>(device); }

#else

bool torch_records(c10::Device) { return false; }
std::unique_ptr<Recorder> torch_recorder(c10::Device) { return nullptr; }

#endif

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
  if (torch_records(device) || library().new_recorder) return "";
  return "eqaccel was built without CUDA's headers (cuda_runtime_api.h), which this torch needs for it: install it again "
         "where they are (" +
         library().failure + ")";
}

GraphCapture::GraphCapture(c10::Device device, const std::function<void()>& body) {
  if (torch_records(device)) {
    recorder_ = torch_recorder(device);
  } else {
    TORCH_CHECK(library().new_recorder, library().failure);
    recorder_.reset(library().new_recorder());
  }
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

// Recordings by torch's own class for CUDA graphs: the one file that needs CUDA's headers, in a library of its own.
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include "graph_capture.h"

namespace {

class CudaRecorder final : public eqaccel::Recorder {
 public:
  // Memory that is kept for later is of no use to a recording, which has its own, and is not given back during one. Other
  // threads may use the device meanwhile.
  void begin() override {
    c10::cuda::CUDACachingAllocator::emptyCache();
    graph_.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
  }
  void end() override { graph_.capture_end(); }
  void replay() override { graph_.replay(); }

 private:
  at::cuda::CUDAGraph graph_;
};

}  // namespace

eqaccel::Recorder* eqaccel_new_recorder() { return new CudaRecorder; }

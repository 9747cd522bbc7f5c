// Launches of GPU kernels of linear maps, whose blocks take some rows and a tile of columns: gpu_linear.h.
#include <limits>
#include <stdexcept>
#include <vector>

#include "gpu_driver.h"
#include "kernel.h"

namespace eqaccel {
namespace {

class LinearKernel : public Kernel {
 public:
  LinearKernel(const Program& program, Backend backend, Scalar scalar, Direction direction, int device)
      : driver_(GpuDriver::get(backend)), device_(device),
        threads_(static_cast<unsigned>(program.number("block_threads"))) {
    const std::string arch = driver_.arch(device), body = program.body(backend, scalar, direction, arch);
    outputs_.resize(program.number(body + "/outputs"));
    for (std::size_t n = 0; n < outputs_.size(); ++n) {
      const std::string output = body + "/" + std::to_string(n);
      outputs_[n] = {program.number(output + "/rows"), program.number(output + "/tiles")};
    }
    const Compiled compiled = program.compile(backend, scalar, direction, arch);
    kernel_ = driver_.get_function(driver_.load_module(compiled.code, device), "eq_linear");
  }

  std::size_t workspace_bytes(const eq_operands&) const override { return 0; }

  void launch(const eq_operands& given, void* stream) const override {
    const DeviceScope scope(driver_, device_);
    eq_operands o = given;
    void* parameters[] = {&o};
    int64_t blocks = 0;
    for (const Output& output : outputs_) blocks += ceil_div(o.num_edges, output.rows) * output.tiles;
    if (blocks > std::numeric_limits<int32_t>::max())
      throw std::invalid_argument("a linear map of " + std::to_string(o.num_edges) +
                                  " rows takes more blocks than a GPU launches: expected fewer rows, split the system");
    if (blocks > 0) driver_.launch(kernel_, {static_cast<unsigned>(blocks)}, {threads_}, 0, stream, parameters);
  }

 private:
  struct Output {
    int64_t rows, tiles;  // rows of a block; blocks side by side
  };
  const GpuDriver& driver_;
  int device_;
  unsigned threads_;
  std::vector<Output> outputs_;
  GpuDriver::Function kernel_ = nullptr;
};

}  // namespace

std::unique_ptr<Kernel> load_linear_kernel(const Program& program, Backend backend, Scalar scalar, Direction direction,
                                           int device) {
  return std::make_unique<LinearKernel>(program, backend, scalar, direction, device);
}

}  // namespace eqaccel

// Launches of the GPU kernels of derivatives of linear maps by weights: gpu_linear_weights.h.
#include <algorithm>
#include <limits>
#include <stdexcept>

#include "gpu_driver.h"
#include "kernel.h"

namespace eqaccel {
namespace {

// Rows of a part at least, blocks that are enough to keep a GPU at work, some of which have many components to add up and
// others few, and numbers that parts write for each that is read: the same on all GPUs, so that sums are too.
constexpr int64_t least_rows = 32, most_parts = 128, enough_blocks = 2048, most_written = 4;

class LinearWeightsKernel : public Kernel {
 public:
  LinearWeightsKernel(const Program& program, Backend backend, Scalar scalar, Direction direction, int device)
      : driver_(GpuDriver::get(backend)), device_(device), weights_(program.number("w_dim")),
        read_of_row_(program.number("x_dim") + program.number("z_dim")),
        scalar_bytes_(scalar == Scalar::float32 ? 4 : 8) {
    const std::string arch = driver_.arch(device), body = program.body(backend, scalar, direction, arch);
    squares_ = program.number(body + "/squares");
    threads_ = static_cast<unsigned>(program.number(body + "/threads"));
    const Compiled compiled = program.compile(backend, scalar, direction, arch);
    const GpuDriver::Module module = driver_.load_module(compiled.code, device);
    kernel_ = driver_.get_function(module, "eq_linear_weights");
    sum_ = driver_.get_function(module, "eq_linear_weights_sum");
  }

  std::size_t workspace_bytes(const eq_operands& o) const override {
    const int64_t parts = parts_of(o.num_edges);
    return parts > 1 ? static_cast<std::size_t>(parts * weights_ * scalar_bytes_) : 0;
  }

  void launch(const eq_operands& given, void* stream) const override {
    const DeviceScope scope(driver_, device_);
    eq_operands o = given;
    auto squares = static_cast<int32_t>(squares_), parts = static_cast<int32_t>(parts_of(o.num_edges));
    const int64_t blocks = squares_ * parts, sums = ceil_div(weights_, threads_);
    if (std::max(blocks, sums) > std::numeric_limits<int32_t>::max())
      throw std::invalid_argument("the derivative by " + std::to_string(weights_) +
                                  " weights of a linear map takes more blocks than a GPU launches: expected fewer");
    void* parameters[] = {&o, &squares, &parts};
    driver_.launch(kernel_, {static_cast<unsigned>(blocks)}, {threads_}, 0, stream, parameters);
    void* of_sum[] = {&o, &parts};
    if (parts > 1) driver_.launch(sum_, {static_cast<unsigned>(sums)}, {threads_}, 0, stream, of_sum);
  }

 private:
  int64_t parts_of(int64_t rows) const {
    const int64_t written = most_written * rows * read_of_row_ / weights_;
    const int64_t parts = std::min({most_parts, enough_blocks / squares_, written, ceil_div(rows, least_rows)});
    return std::max<int64_t>(parts, 1);
  }

  const GpuDriver& driver_;
  int device_;
  int64_t weights_, read_of_row_, scalar_bytes_, squares_ = 0;
  unsigned threads_ = 0;
  GpuDriver::Function kernel_ = nullptr, sum_ = nullptr;
};

}  // namespace

std::unique_ptr<Kernel> load_linear_weights_kernel(const Program& program, Backend backend, Scalar scalar,
                                                   Direction direction, int device) {
  return std::make_unique<LinearWeightsKernel>(program, backend, scalar, direction, device);
}

}  // namespace eqaccel

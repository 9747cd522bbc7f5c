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
      : driver_(GpuDriver::get(backend)), device_(device) {
    const std::string arch = driver_.arch(device), body = program.body(backend, scalar, direction, arch);
    const Compiled compiled = program.compile(backend, scalar, direction, arch);
    const GpuDriver::Module module = driver_.load_module(compiled.code, device);
    shapes_.resize(program.number(body + "/shapes"));
    for (std::size_t k = 0; k < shapes_.size(); ++k) {
      const std::string shape = body + "/" + std::to_string(k);
      shapes_[k].kernel = driver_.get_function(module, ("eq_linear_" + std::to_string(k)).c_str());
      shapes_[k].threads = static_cast<unsigned>(program.number(shape + "/threads"));
      shapes_[k].outputs.resize(program.number(body + "/outputs"));
      for (std::size_t n = 0; n < shapes_[k].outputs.size(); ++n) {
        const std::string output = shape + "/" + std::to_string(n);
        shapes_[k].outputs[n] = {program.number(output + "/rows"), program.number(output + "/tiles")};
      }
    }
  }

  std::size_t workspace_bytes(const eq_operands&) const override { return 0; }

  void launch(const eq_operands& given, void* stream) const override {
    const DeviceScope scope(driver_, device_);
    eq_operands o = given;
    void* parameters[] = {&o};
    const Shape& shape = find_shape(o.num_edges);
    const int64_t blocks = shape.blocks(o.num_edges);
    if (blocks > std::numeric_limits<int32_t>::max())
      throw std::invalid_argument("a linear map of " + std::to_string(o.num_edges) +
                                  " rows takes more blocks than a GPU launches: expected fewer rows, split the system");
    if (blocks > 0)
      driver_.launch(shape.kernel, {static_cast<unsigned>(blocks)}, {shape.threads}, 0, stream, parameters);
  }

 private:
  struct Output {
    int64_t rows, tiles;  // rows of a block; blocks side by side
  };
  struct Shape {
    GpuDriver::Function kernel = nullptr;
    unsigned threads = 0;
    std::vector<Output> outputs;

    int64_t blocks(int64_t rows) const {
      int64_t sum = 0;
      for (const Output& output : outputs) sum += ceil_div(rows, output.rows) * output.tiles;
      return sum;
    }
  };
  // The one with the largest blocks of those that keep all multiprocessors at work, or with the smallest blocks.
  const Shape& find_shape(int64_t rows) const {
    const int64_t least = driver_.device(device_).multiprocessors;
    for (const Shape& shape : shapes_)
      if (shape.blocks(rows) >= least) return shape;
    return shapes_.back();
  }

  const GpuDriver& driver_;
  int device_;
  std::vector<Shape> shapes_;  // large blocks first
};

}  // namespace

std::unique_ptr<Kernel> load_linear_kernel(const Program& program, Backend backend, Scalar scalar, Direction direction,
                                           int device) {
  return std::make_unique<LinearKernel>(program, backend, scalar, direction, device);
}

}  // namespace eqaccel

// Launches of GPU kernels that compute each row of a batch for itself, in `num_edges` threads: gpu_polynomial.h,
// gpu_radial_basis.h, gpu_radial_layer.h, gpu_radial_network.h, gpu_silu.h and gpu_gate.h in eqaccel/families.
#include "gpu_driver.h"
#include "kernel.h"

namespace eqaccel {
namespace {

class RowKernel : public Kernel {
 public:
  RowKernel(const Program& program, Backend backend, Scalar scalar, Direction direction, int device)
      : driver_(GpuDriver::get(backend)), device_(device),
        threads_(static_cast<unsigned>(program.number("row_threads"))) {
    const Compiled compiled = program.compile(backend, scalar, direction, driver_.arch(device));
    kernel_ = driver_.get_function(driver_.load_module(compiled.code, device), "eq_rows");
  }

  std::size_t workspace_bytes(const eq_operands&) const override { return 0; }

  void launch(const eq_operands& given, void* stream) const override {
    const DeviceScope scope(driver_, device_);
    eq_operands o = given;
    void* parameters[] = {&o};
    const auto blocks = static_cast<unsigned>(ceil_div(o.num_edges, threads_));  // rows number less than 2^31
    driver_.launch(kernel_, {blocks}, {threads_}, 0, stream, parameters);
  }

 private:
  const GpuDriver& driver_;
  int device_;
  unsigned threads_;
  GpuDriver::Function kernel_ = nullptr;
};

}  // namespace

std::unique_ptr<Kernel> load_row_kernel(const Program& program, Backend backend, Scalar scalar, Direction direction,
                                        int device) {
  return std::make_unique<RowKernel>(program, backend, scalar, direction, device);
}

}  // namespace eqaccel

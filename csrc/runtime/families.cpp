#include "families.h"

#include "matrix_product.h"
#include "neighbors.h"
#include "payload.h"

namespace eqaccel {
namespace {

void keep_kernel(const Program& program, Backend backend, Scalar scalar, Direction direction, int device) {
  program.kernel(backend, scalar, direction, device);
}

std::optional<std::string> every_arch(const Program&, Backend, Scalar, Direction, const std::string& arch) {
  return arch;
}

// In place of second derivatives, which are linear maps again, a linear map has a kernel of the derivative by weights.
std::unique_ptr<Kernel> load_linear(const Program& program, Backend backend, Scalar scalar, Direction direction,
                                    int device) {
  const auto load = direction == Direction::double_backward ? load_linear_weights_kernel : load_linear_kernel;
  return load(program, backend, scalar, direction, device);
}

void keep_matrix_product(const Program& program, Backend backend, Scalar scalar, Direction direction, int device) {
  if (backend == Backend::cpu) {
    program.kernel(backend, scalar, direction, device);
  } else {
    const std::string device_arch = GpuDriver::get(backend).arch(device);
    const auto arch = MatrixProduct::compile_arch(program, device_arch);
    if (!arch) throw std::invalid_argument("device: expected one with a kernel of matrix products, got " + device_arch);
    MatrixProduct::get(program, device, *arch);
  }
}

void keep_neighbors(const Program& program, Backend backend, Scalar scalar, Direction, int device) {
  NeighborKernels::get(program, backend, scalar, device);
}

std::optional<std::string> every_gpu(const Program&, Backend backend, Scalar, Direction direction,
                                     const std::string& arch) {
  if (backend == Backend::cpu || direction != Direction::forward) return std::nullopt;
  return arch;
}

std::optional<std::string> product_arch(const Program& program, Backend backend, Scalar scalar, Direction direction,
                                        const std::string& arch) {
  if (direction != Direction::forward) return std::nullopt;
  if (backend == Backend::cpu) return arch;
  if (backend != Backend::cuda || scalar != Scalar::float32) return std::nullopt;
  return MatrixProduct::compile_arch(program, arch);
}

// mma.sync of halves with sums in float32, ldmatrix.
std::optional<std::string> network_arch(const Program&, Backend backend, Scalar scalar, Direction direction,
                                        const std::string& arch) {
  constexpr int first_architecture = 80;
  const bool is_derivative = direction == Direction::forward || direction == Direction::backward;
  if (backend != Backend::cuda || scalar != Scalar::float32 || !is_derivative) return std::nullopt;
  if (arch.rfind("sm_", 0) != 0 || std::stoi(arch.substr(3)) < first_architecture) return std::nullopt;
  return arch;
}

// Adding a family is a folder in eqaccel/families, and a row here.
constexpr Family families[] = {
    {"tensor_product", load_gpu_kernel, keep_kernel, every_arch},
    {"polynomial", load_row_kernel, keep_kernel, every_arch},
    {"radial_basis", load_row_kernel, keep_kernel, every_arch},
    {"radial_layer", load_row_kernel, keep_kernel, every_arch},
    {"radial_network", load_row_kernel, keep_kernel, network_arch},
    {"silu", load_row_kernel, keep_kernel, every_arch},
    {"gate", load_row_kernel, keep_kernel, every_arch},
    {"linear", load_linear, keep_kernel, every_arch},
    {"matrix_product", nullptr, keep_matrix_product, product_arch},
    {"neighbors", nullptr, keep_neighbors, every_gpu},
};

}  // namespace

const Family& find_family(const std::string& name) {
  std::string known;
  for (const Family& family : families) {
    if (family.name == name) return family;
    known += (known.empty() ? "" : ", ") + std::string(family.name);
  }
  throw bad_payload("a family of kernels that the installed eqaccel knows (" + known + ")",
                    "'" + name + "': make or export the model again with it");
}

}  // namespace eqaccel

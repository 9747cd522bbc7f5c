// A compiled direction, loaded and ready to launch. One class per kind of device derives from Kernel.
#pragma once
#include <cstddef>
#include <memory>

#include "program.h"

namespace eqaccel {

class Kernel {
 public:
  virtual ~Kernel() = default;
  // Queues the work on `stream` (null on the CPU, where it is done on return). Does not synchronise. On a GPU it does not
  // allocate; on the CPU it takes some scratch for each thread, and throws std::bad_alloc if there is none.
  virtual void launch(const eq_operands&, void* stream) const = 0;
  // The same for rows of weights that edges share: `shared` is what the family has for it, see Program::launch_shared.
  // Throws std::invalid_argument if the kernel is none for that.
  virtual void launch_shared(const eq_operands&, const int32_t* shared, void* stream) const;
  // Scratch that `launch` needs; reads the sizes and flags of the operands, never what they point to.
  virtual std::size_t workspace_bytes(const eq_operands&) const = 0;
};

// A kernel from the bytes of its shared library.
std::unique_ptr<Kernel> open_cpu_kernel(const std::string& code);
std::unique_ptr<Kernel> load_cpu_kernel(const Program&, Scalar, Direction);
// Backend::cuda or Backend::hip: compiles for the architecture of `device`, loads the module there.
std::unique_ptr<Kernel> load_gpu_kernel(const Program&, Backend, Scalar, Direction, int device);
// The same for linear maps, which have numbers of blocks for each output.
std::unique_ptr<Kernel> load_linear_kernel(const Program&, Backend, Scalar, Direction, int device);
// The same for their derivatives by weights, the direction "double_backward" of their programs.
std::unique_ptr<Kernel> load_linear_weights_kernel(const Program&, Backend, Scalar, Direction, int device);
// The same for a program whose rows are computed each for itself, by a thread; it has the number "row_threads".
std::unique_ptr<Kernel> load_row_kernel(const Program&, Backend, Scalar, Direction, int device);

}  // namespace eqaccel

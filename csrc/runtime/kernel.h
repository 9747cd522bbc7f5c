// A compiled direction, loaded and ready to launch. One class per kind of device derives from Kernel.
#pragma once
#include <cstddef>
#include <memory>

#include "program.h"

namespace eqaccel {

// Some slots of a graph, which follow each other.
struct SlotRange {
  int64_t first, last, most;  // `most`: slots of the longest range
};

class Kernel {
 public:
  virtual ~Kernel() = default;
  // Queues the work on `stream`, a cudaStream_t or hipStream_t (null on the CPU, where it is done on return). Does not synchronise. On a GPU it does not
  // allocate; on the CPU it takes some scratch for each thread, and throws std::bad_alloc if there is none.
  virtual void launch(const eq_operands&, void* stream) const = 0;
  // Where edges share rows of weights. For a tensor product `shared` holds the row of w of each edge, and the gradient of
  // w has a row for each edge; on a GPU slots have to be edges. For a matrix product, on a CPU, it holds two rows of x for
  // each row of z, whose sum is multiplied, the second -1 for none. Throws std::invalid_argument for other kernels, and
  // for those of older files.
  virtual void launch_shared(const eq_operands&, const int32_t* shared, void* stream) const;
  // `launch_shared` of a backward on a GPU, some slots at a time: from slot 0 on, one range after another, with one workspace
  // and the same operands. Of gradients of weights there are those of the range alone; those of x are complete in the end.
  virtual void launch_slots(const eq_operands&, const int32_t* shared, const SlotRange&, void* stream) const;
  // Scratch that `launch` needs; reads the sizes and flags of the operands, never what they point to.
  virtual std::size_t workspace_bytes(const eq_operands&) const = 0;
  // The same for `launch_slots`, of ranges of at most so many slots.
  virtual std::size_t slots_workspace_bytes(const eq_operands&, int64_t slots) const;
};

// A kernel from the bytes of its shared library, and what it takes with its operands.
std::unique_ptr<Kernel> open_cpu_kernel(const std::string& code, Tables tables);
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

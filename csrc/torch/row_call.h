// What operators have in common whose rows are computed each for itself.
#pragma once
#include <limits>

#include "kernel_call.h"

namespace eqaccel::ops {

// A call whose operands have a row for each row of x.
class RowCall : public KernelCall {
 public:
  RowCall(const char* op, const Tensor& payload, int64_t key, const Tensor& x) : KernelCall(op, payload, key, x) {
    TORCH_CHECK(x.dim() == 2, op, ": argument 'x' must have shape (rows, ", program_->number("x_dim"), "), got ",
                x.sizes(), ". Flatten leading dimensions with .flatten(0, -2).");
    TORCH_CHECK(x.size(0) < std::numeric_limits<int32_t>::max(), op, ": rows must number less than 2^31, got ",
                x.size(0), ". Split a larger system.");
    // Of these, `num_edges` may be set to the threads that a GPU takes.
    ops_.num_receivers = ops_.num_senders = ops_.num_edges = x.size(0);
    ops_.x = rows("x", x, "x_dim");
  }

  const void* rows(const char* name, const Tensor& t, const char* dim) {
    check_kind(name, t);
    TORCH_CHECK(t.dim() == 2 && t.size(0) == ops_.num_receivers && t.size(1) == program_->number(dim), op_,
                ": argument '", name, "' must have shape (", ops_.num_receivers, ", ", program_->number(dim), "), got ",
                t.sizes(), ". Check the number of rows and the module that the operand is for.");
    return held(t);
  }
  Tensor new_rows(const char* dim) const { return KernelCall::new_rows(ops_.num_receivers, dim); }

  void launch(Direction direction) {
    if (ops_.num_edges > 0) run(direction);
  }
};

}  // namespace eqaccel::ops

// eqaccel::linear: see linear.h. The map, its transpose, which takes gz to x, and the derivative by weights have kernels.
#include "linear.h"

#include <torch/library.h>

#include <limits>
#include <vector>

#include "differentiate.h"
#include "kernel_call.h"

namespace eqaccel::ops {

constexpr const char* linear_name = "eqaccel::linear";
typedef LinearOperands Slot;

Tensor linear(const LinearProblem& p, const LinearFactors& factors) {
  using Signature = Tensor(const Tensor&, int64_t, const Tensor&, const Tensor&, const Tensor&, int64_t, int64_t);
  static const auto op = find_operator<Signature>(linear_name);
  return op.call(p.payload, p.key, factors[0], factors[1], factors[2], p.missing, p.columns);
}

namespace {
namespace linear_file {

// Where an operand is among those that are given.
int64_t position(int64_t slot, int64_t missing) { return slot - (slot > missing); }

void check_missing(int64_t missing) {
  TORCH_CHECK(0 <= missing && missing < Slot::count, linear_name, ": argument 'missing' must be 0 to ", Slot::count - 1,
              ", got ", missing, ". It is the number of the operand that is not given: x, y, w or gz.");
}

class LinearCall : public KernelCall {
 public:
  LinearCall(const LinearProblem& problem, const LinearFactors& factors)
      : KernelCall(linear_name, problem.payload, problem.key, factors[0]), missing_(problem.missing) {
    check_missing(missing_);
    const int64_t width = program_->number(dims[missing_]);
    TORCH_CHECK(problem.columns == width, linear_name, ": argument 'columns' must be ", width,
                ", as in the payload, got ", problem.columns, ". Pass the values of one module.");
    const Tensor& first = factors[0];  // has rows: only w has none
    TORCH_CHECK(first.dim() == 2, linear_name, ": argument '", missing_ == 0 ? "y" : "x",
                "' must have shape (rows, columns), got ", first.sizes(),
                ". Flatten leading dimensions with .flatten(0, -2).");
    TORCH_CHECK(first.size(0) < std::numeric_limits<int32_t>::max(), linear_name,
                ": rows must number less than 2^31, got ", first.size(0), ". Split a larger system.");
    ops_.num_receivers = ops_.num_senders = ops_.num_edges = first.size(0);
    for (int64_t slot = 0; slot < Slot::count; ++slot)
      if (slot != missing_) operands_[slot] = take(slot, factors[position(slot, missing_)]);
  }

  Tensor run() {
    if (missing_ == Slot::y) return linear_by_attributes(*program_, operands_[0], operands_[2], operands_[3]);
    if (missing_ == Slot::w) return by_weights();
    const Tensor result = new_rows(ops_.num_edges, dims[missing_]);
    ops_.y = operands_[Slot::y].const_data_ptr();
    ops_.w = operands_[Slot::w].const_data_ptr();
    const bool forward = missing_ == Slot::gz;
    (forward ? ops_.x : ops_.gz) = operands_[forward ? Slot::x : Slot::gz].const_data_ptr();
    (forward ? ops_.z : ops_.gx) = result.mutable_data_ptr();
    if (result.numel() > 0) KernelCall::run(forward ? Direction::forward : Direction::backward);
    return result;
  }

 private:
  Tensor by_weights() {
    const Tensor &x = operands_[Slot::x], &y = operands_[Slot::y], &gz = operands_[Slot::gz];
    if (ops_.num_edges == 0) return at::zeros({program_->number("w_dim")}, x.options());
    const Tensor result = at::empty({program_->number("w_dim")}, x.options());
    ops_.x = x.const_data_ptr();
    ops_.y = y.const_data_ptr();
    ops_.gz = gz.const_data_ptr();
    ops_.gw = result.mutable_data_ptr();
    KernelCall::run(Direction::double_backward);
    return result;
  }

  static constexpr const char* dims[] = {"x_dim", "y_dim", "w_dim", "z_dim"};
  static constexpr const char* names[] = {"x", "y", "w", "gz"};

  Tensor take(int64_t slot, const Tensor& t) const {
    check_kind(names[slot], t);
    const int64_t width = program_->number(dims[slot]);
    if (slot == Slot::w) {
      TORCH_CHECK(t.dim() == 1 && t.size(0) == width, linear_name, ": argument 'w' must have shape (", width,
                  ",), got ", t.sizes(), ". Check the module that the weights are for.");
      return t.contiguous();
    }
    TORCH_CHECK(t.dim() == 2 && t.size(0) == ops_.num_edges && t.size(1) == width, linear_name, ": argument '",
                names[slot], "' must have shape (", ops_.num_edges, ", ", width, "), got ", t.sizes(),
                ". Check the number of rows and the module that the operand is for.");
    return t.contiguous();
  }

  int64_t missing_;
  std::array<Tensor, Slot::count> operands_;
};

Tensor compute(const Tensor& payload, int64_t key, const Tensor& f, const Tensor& g, const Tensor& h, int64_t missing,
               int64_t columns) {
  return LinearCall({payload, key, missing, columns}, {f, g, h}).run();
}

Tensor shape(const Tensor&, int64_t, const Tensor& f, const Tensor&, const Tensor&, int64_t missing, int64_t columns) {
  check_missing(missing);
  if (missing == Slot::w) return stand_in({c10::SymInt(columns)}, f);
  return stand_in({f.sym_size(0), columns}, f);
}

// Under autocast in float32, as tensor products.
Tensor under_autocast(const Tensor& payload, int64_t key, const Tensor& f, const Tensor& g, const Tensor& h,
                      int64_t missing, int64_t columns) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto cast = [&](const Tensor& t) { return cast_to_float32(t, f); };
  return linear({payload, key, missing, columns}, {cast(f), cast(g), cast(h)});
}

struct Form {
  static Tensor compute(const LinearProblem& p, const Tensor& f, const Tensor& g, const Tensor& h) {
    return linear(p, {f, g, h});
  }

  // Each operand is for the gradients of the others.
  static void save(AutogradContext& context, const LinearProblem& p, const variable_list& operands) {
    variable_list kept;
    std::vector<int64_t> columns;
    for (std::size_t n = 0; n < operands.size(); ++n) {
      bool needed = false;
      for (std::size_t other = 0; other < operands.size(); ++other)
        needed = needed || (other != n && operands[other].requires_grad());
      kept.push_back(needed ? operands[n] : Tensor());
      columns.push_back(operands[n].sym_size(-1).guard_int(__FILE__, __LINE__));  // that of a module is a number
    }
    kept.push_back(p.payload);
    context.save_for_backward(std::move(kept));
    context.saved_data["columns"] = columns;
    context.saved_data["key"] = p.key;
    context.saved_data["missing"] = p.missing;
  }

  // With what comes in at the place that was missing, the operand `position` becomes the one that is.
  static variable_list backward(AutogradContext* context, const variable_list& incoming) {
    const variable_list saved = context->get_saved_variables();
    const int64_t missing = context->saved_data["missing"].toInt();
    const std::vector<int64_t> columns = context->saved_data["columns"].toIntVector();
    variable_list gradients(Slot::count - 1);
    for (int64_t wanted = 0; wanted < Slot::count; ++wanted) {
      const int64_t at = position(wanted, missing);
      if (wanted == missing || !context->needs_input_grad(at)) continue;
      LinearFactors factors;
      for (int64_t slot = 0; slot < Slot::count; ++slot)
        if (slot != wanted)
          factors[position(slot, wanted)] = slot == missing ? incoming[0] : saved[position(slot, missing)];
      const LinearProblem p{saved.back(), context->saved_data["key"].toInt(), wanted, columns[at]};
      gradients[at] = linear(p, factors);
    }
    return gradients;
  }

  static variable_list tangents(const LinearProblem& p, const variable_list& operands, const variable_list& along) {
    variable_list sum(1);
    for (std::size_t n = 0; n < along.size(); ++n) {
      if (!along[n].defined()) continue;
      LinearFactors factors{operands[0], operands[1], operands[2]};
      factors[n] = along[n];
      add(sum[0], linear(p, factors));
    }
    return sum;
  }
};

Tensor differentiable(const Tensor& payload, int64_t key, const Tensor& f, const Tensor& g, const Tensor& h,
                      int64_t missing, int64_t columns) {
  return differentiate<Form>(LinearProblem{payload, key, missing, columns}, f, g, h);
}

TORCH_LIBRARY_IMPL(eqaccel, CPU, library) { library.impl("linear", compute); }
TORCH_LIBRARY_IMPL(eqaccel, CUDA, library) { library.impl("linear", compute); }
TORCH_LIBRARY_IMPL(eqaccel, Meta, library) { library.impl("linear", shape); }
TORCH_LIBRARY_IMPL(eqaccel, Autograd, library) { library.impl("linear", differentiable); }
TORCH_LIBRARY_IMPL(eqaccel, AutocastCPU, library) { library.impl("linear", under_autocast); }
TORCH_LIBRARY_IMPL(eqaccel, AutocastCUDA, library) { library.impl("linear", under_autocast); }

}  // namespace linear_file
}  // namespace
}  // namespace eqaccel::ops

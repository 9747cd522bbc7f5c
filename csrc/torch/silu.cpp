// eqaccel::silu, factor * y / (1 + exp(-y)) of y = scale * x, and its first two derivatives: each is one kernel over all
// elements. Where the second is differentiated itself, it is composed of torch's operators.
#include "silu.h"

#include <torch/library.h>

#include "kernel_call.h"
#include "logistic.h"
#include "row_function.h"

namespace eqaccel::ops {
namespace {
namespace silu_file {

using Problem = SiluSource;
using SecondGradients = RowSecondGradients;

Tensor call_forward(const Problem& p, const Tensor& x) {
  using Signature = Tensor(const Tensor&, int64_t, const Tensor&, double, double);
  static const auto op = find_operator<Signature>("eqaccel::silu");
  return op.call(p.payload, p.key, x, p.factor, p.scale);
}
Tensor call_backward(const Problem& p, const Tensor& gz, const Tensor& x) {
  using Signature = Tensor(const Tensor&, int64_t, const Tensor&, const Tensor&, double, double);
  static const auto op = find_operator<Signature>("eqaccel::silu_backward");
  return op.call(p.payload, p.key, gz, x, p.factor, p.scale);
}
SecondGradients call_double_backward(const Problem& p, const Tensor& gz, const Tensor& x, const Tensor& a) {
  using Signature =
      SecondGradients(const Tensor&, int64_t, const Tensor&, const Tensor&, const Tensor&, double, double);
  static const auto op = find_operator<Signature>("eqaccel::silu_double_backward");
  return op.call(p.payload, p.key, gz, x, a, p.factor, p.scale);
}

// A call whose operands have the shape of x.
class SiluCall : public KernelCall {
 public:
  SiluCall(const char* op, const Tensor& payload, int64_t key, const Tensor& x) : KernelCall(op, payload, key, x) {
    const int64_t share = program_->number("thread_elements");
    ops_.num_receivers = x.numel();
    ops_.num_edges = (x.numel() + share - 1) / share;
    ops_.x = held(x);
  }

  const void* elements(const char* name, const Tensor& t) {
    check_kind(name, t);
    TORCH_CHECK(t.sizes() == like_.sizes(), op_, ": argument '", name, "' must have shape ", like_.sizes(),
                ", like 'x', got ", t.sizes(), ". Pass operands of one call.");
    return held(t);
  }
  Tensor new_elements() const { return empty_kept(like_.sizes(), like_.options()); }

  void launch(Direction direction) {
    if (ops_.num_edges > 0) run(direction);
  }
};

Tensor run_forward(const Tensor& payload, int64_t key, const Tensor& x, double, double) {
  SiluCall call("eqaccel::silu", payload, key, x);
  const Tensor z = call.new_elements();
  call.operands().z = z.mutable_data_ptr();
  call.launch(Direction::forward);
  return z;
}
Tensor run_backward(const Tensor& payload, int64_t key, const Tensor& gz, const Tensor& x, double, double) {
  SiluCall call("eqaccel::silu_backward", payload, key, x);
  call.operands().gz = call.elements("gz", gz);
  const Tensor gx = call.new_elements();
  call.operands().gx = gx.mutable_data_ptr();
  call.launch(Direction::backward);
  return gx;
}
SecondGradients run_double_backward(const Tensor& payload, int64_t key, const Tensor& gz, const Tensor& x,
                                    const Tensor& a, double, double) {
  SiluCall call("eqaccel::silu_double_backward", payload, key, x);
  call.operands().gz = call.elements("gz", gz);
  call.operands().a = call.elements("a", a);
  const Tensor ggz = call.new_elements(), gx = call.new_elements();
  call.operands().z = ggz.mutable_data_ptr();
  call.operands().gx = gx.mutable_data_ptr();
  call.launch(Direction::double_backward);
  return {ggz, gx};
}

struct Silu {
  using Problem = SiluSource;
  static constexpr auto forward = call_forward;
  static constexpr auto backward = call_backward;
  static constexpr auto double_backward = call_double_backward;

  // Element by element, so that a tangent is a gradient.
  static Tensor tangent(const Problem& p, const Tensor& x, const Tensor& along) { return call_backward(p, along, x); }
  static SecondGradients composed(const Problem& p, const Tensor& gz, const Tensor& x, const Tensor& a) {
    const Logistic s(p.scale * x);
    const double first = p.factor * p.scale, second = first * p.scale;
    return {first * a * s.silu_slope(), second * a * gz * s.silu_curvature()};
  }
};
using Differentiable = RowFunction<Silu>;

// The recipe of what a node of autograd has given, if it is of this operator.
template <class Operator>
std::optional<SiluRecipe> recipe_of(torch::autograd::Node* producer) {
  AutogradContext* const context = context_of(producer, Operator::backward);
  if (context == nullptr) return std::nullopt;
  try {
    variable_list saved;
    Problem problem = Operator::restore(context, saved);
    for (Tensor& operand : saved) operand = operand.detach();
    return SiluRecipe{std::move(problem), std::move(saved)};
  } catch (const c10::Error&) {  // a backward pass has given them back
    return std::nullopt;
  }
}

Tensor forward(const Tensor& payload, int64_t key, const Tensor& x, double factor, double scale) {
  return Differentiable::forward({payload, key, factor, scale}, x);
}
Tensor backward(const Tensor& payload, int64_t key, const Tensor& gz, const Tensor& x, double factor, double scale) {
  return Differentiable::backward({payload, key, factor, scale}, gz, x);
}
SecondGradients double_backward(const Tensor& payload, int64_t key, const Tensor& gz, const Tensor& x, const Tensor& a,
                                double factor, double scale) {
  return Differentiable::double_backward({payload, key, factor, scale}, gz, x, a);
}

// Shapes without data, for fake tensors.
Tensor forward_shape(const Tensor&, int64_t, const Tensor& x, double, double) { return stand_in(x); }
Tensor backward_shape(const Tensor&, int64_t, const Tensor&, const Tensor& x, double, double) { return stand_in(x); }
SecondGradients double_backward_shape(const Tensor&, int64_t, const Tensor&, const Tensor& x, const Tensor&, double,
                                      double) {
  return {stand_in(x), stand_in(x)};
}

// Under autocast in float32, as tensor products.
Tensor forward_autocast(const Tensor& payload, int64_t key, const Tensor& x, double factor, double scale) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return call_forward({payload, key, factor, scale}, cast_to_float32(x, x));
}

void register_kernels(torch::Library& library) {
  library.impl("silu", run_forward);
  library.impl("silu_backward", run_backward);
  library.impl("silu_double_backward", run_double_backward);
}
TORCH_LIBRARY_IMPL(eqaccel, CPU, library) { register_kernels(library); }
TORCH_LIBRARY_IMPL(eqaccel, CUDA, library) { register_kernels(library); }
TORCH_LIBRARY_IMPL(eqaccel, Autograd, library) {
  library.impl("silu", forward);
  library.impl("silu_backward", backward);
  library.impl("silu_double_backward", double_backward);
}
TORCH_LIBRARY_IMPL(eqaccel, Meta, library) {
  library.impl("silu", forward_shape);
  library.impl("silu_backward", backward_shape);
  library.impl("silu_double_backward", double_backward_shape);
}
TORCH_LIBRARY_IMPL(eqaccel, AutocastCPU, library) { library.impl("silu", forward_autocast); }
TORCH_LIBRARY_IMPL(eqaccel, AutocastCUDA, library) { library.impl("silu", forward_autocast); }

}  // namespace silu_file
}  // namespace

Tensor SiluRecipe::make() const {
  const at::NoGradGuard values_alone;
  return operands.size() == 1 ? silu_file::call_forward(source, operands[0])
                              : silu_file::call_backward(source, operands[0], operands[1]);
}

std::optional<SiluRecipe> silu_recipe(const Tensor& t) {
  const auto& producer = t.grad_fn();
  if (!producer || t._version() > 0) return std::nullopt;  // it may have been written to without a record
  auto recipe = silu_file::recipe_of<silu_file::Differentiable::Forward>(producer.get());
  return recipe ? recipe : silu_file::recipe_of<silu_file::Differentiable::Backward>(producer.get());
}

}  // namespace eqaccel::ops

// eqaccel::polynomial and its first two derivatives: each row of z is a polynomial in the features x of the same row with
// coefficients w of its own. Derivatives beyond these are composed of torch's operators, from the terms in the payload.
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <array>
#include <limits>
#include <sstream>

#include "call.h"

namespace eqaccel::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;
using First = std::tuple<Tensor, Tensor>;           // gradients of <gz, z> with respect to x and w
using Second = std::tuple<Tensor, Tensor, Tensor>;  // gradients of <a, gx> + <c, gw> with respect to gz, x and w

struct Problem {
  Tensor payload;
  int64_t key;
  int64_t outputs;  // columns of z: shapes must be known where the payload can not be read
};

Tensor polynomial(const Problem& p, const Tensor& x, const Tensor& w) {
  using Signature = Tensor(const Tensor&, int64_t, const Tensor&, const Tensor&, int64_t);
  static const auto op = find_operator<Signature>("eqaccel::polynomial");
  return op.call(p.payload, p.key, x, w, p.outputs);
}
First polynomial_backward(const Problem& p, const Tensor& gz, const Tensor& x, const Tensor& w) {
  using Signature = First(const Tensor&, int64_t, const Tensor&, const Tensor&, const Tensor&, int64_t);
  static const auto op = find_operator<Signature>("eqaccel::polynomial_backward");
  return op.call(p.payload, p.key, gz, x, w, p.outputs);
}
Second polynomial_double_backward(const Problem& p, const Tensor& gz, const Tensor& x, const Tensor& w, const Tensor& a,
                                  const Tensor& c) {
  using Signature = Second(const Tensor&, int64_t, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                           const Tensor&, int64_t);
  static const auto op = find_operator<Signature>("eqaccel::polynomial_double_backward");
  return op.call(p.payload, p.key, gz, x, w, a, c, p.outputs);
}

// A call whose operands have a row for each row of x.
class Call : public KernelCall {
 public:
  Call(const char* op, const Problem& problem, const Tensor& x, const Tensor& w)
      : KernelCall(op, problem.payload, problem.key, x) {
    TORCH_CHECK(x.dim() == 2, op, ": argument 'x' must have shape (rows, ", program_->number("x_dim"), "), got ",
                x.sizes(), ". Flatten leading dimensions with .flatten(0, -2).");
    TORCH_CHECK(x.size(0) < std::numeric_limits<int32_t>::max(), op, ": rows must number less than 2^31, got ",
                x.size(0), ". Split a larger system.");
    TORCH_CHECK(problem.outputs == program_->number("z_dim"), op, ": argument 'num_outputs' must be ",
                program_->number("z_dim"), ", as in the payload, got ", problem.outputs,
                ". Pass the values of one module.");
    ops_.num_receivers = ops_.num_senders = ops_.num_edges = x.size(0);
    ops_.x = rows("x", x, "x_dim");
    ops_.w = rows("w", w, "w_dim");
  }

  const void* rows(const char* name, const Tensor& t, const char* dim) {
    check_kind(name, t);
    TORCH_CHECK(t.dim() == 2 && t.size(0) == ops_.num_edges && t.size(1) == program_->number(dim), op_, ": argument '",
                name, "' must have shape (", ops_.num_edges, ", ", program_->number(dim), "), got ", t.sizes(),
                ". Check the number of rows and the module that the operand is for.");
    constexpr uintptr_t widest = 16;  // bytes that a GPU thread reads at a time
    const Tensor& kept = held_.emplace_back(t.contiguous());
    if (reinterpret_cast<uintptr_t>(kept.const_data_ptr()) % widest != 0) held_.emplace_back(kept.clone());
    return held_.back().const_data_ptr();
  }
  Tensor new_rows(const char* dim) const { return KernelCall::new_rows(ops_.num_edges, dim); }

  void launch(Direction direction) {
    if (ops_.num_edges > 0) run(direction);
  }
};

Tensor forward(const Tensor& payload, int64_t key, const Tensor& x, const Tensor& w, int64_t outputs) {
  Call call("eqaccel::polynomial", {payload, key, outputs}, x, w);
  const Tensor z = call.new_rows("z_dim");
  call.operands().z = z.mutable_data_ptr();
  call.launch(Direction::forward);
  return z;
}

First backward(const Tensor& payload, int64_t key, const Tensor& gz, const Tensor& x, const Tensor& w,
               int64_t outputs) {
  Call call("eqaccel::polynomial_backward", {payload, key, outputs}, x, w);
  call.operands().gz = call.rows("gz", gz, "z_dim");
  const Tensor gx = call.new_rows("x_dim"), gw = call.new_rows("w_dim");
  call.operands().gx = gx.mutable_data_ptr();
  call.operands().gw = gw.mutable_data_ptr();
  call.launch(Direction::backward);
  return {gx, gw};
}

Second double_backward(const Tensor& payload, int64_t key, const Tensor& gz, const Tensor& x, const Tensor& w,
                       const Tensor& a, const Tensor& c, int64_t outputs) {
  Call call("eqaccel::polynomial_double_backward", {payload, key, outputs}, x, w);
  eq_operands& ops = call.operands();
  ops.gz = call.rows("gz", gz, "z_dim");
  ops.a = call.rows("a", a, "x_dim");
  ops.c = call.rows("c", c, "w_dim");
  const Tensor ggz = call.new_rows("z_dim"), gx = call.new_rows("x_dim"), gw = call.new_rows("w_dim");
  ops.z = ggz.mutable_data_ptr();
  ops.gx = gx.mutable_data_ptr();
  ops.gw = gw.mutable_data_ptr();
  call.launch(Direction::double_backward);
  return {ggz, gx, gw};
}

// z by torch's operators. Factors are picked, and terms added up, by products with matrices of ones and zeros, so that
// derivatives of any order are sums in a fixed order.
Tensor composed(const Problem& p, const Tensor& x, const Tensor& w) {
  const auto program = program_of("eqaccel::polynomial", p.payload, p.key);
  std::vector<int64_t> outputs, weights;
  std::array<std::vector<int64_t>, 3> features;
  std::vector<double> coefficients;
  std::istringstream lines(program->entry("terms"));
  lines.imbue(std::locale::classic());
  for (int64_t output, weight, i, j, l; lines >> output >> weight >> i >> j >> l >> coefficients.emplace_back();) {
    outputs.push_back(output);
    weights.push_back(weight);
    features[0].push_back(i);
    features[1].push_back(j);
    features[2].push_back(l);
  }
  coefficients.resize(outputs.size());
  const auto pick = [&](const std::vector<int64_t>& columns, int64_t count) {
    return at::one_hot(at::tensor(columns, at::kLong), count).to(x.options());
  };
  const Tensor padded = at::cat({x, at::ones({x.size(0), 1}, x.options())}, 1);
  Tensor products = at::mm(w, pick(weights, w.size(1)).t());
  for (const auto& of_term : features) products = products * at::mm(padded, pick(of_term, padded.size(1)).t());
  const Tensor scale = at::tensor(coefficients, at::kDouble).to(x.options()).unsqueeze(1);
  return at::mm(products, pick(outputs, p.outputs) * scale);
}

void save(AutogradContext* context, const Problem& p, variable_list operands) {
  operands.push_back(p.payload);
  context->save_for_backward(std::move(operands));
  context->saved_data["key"] = p.key;
  context->saved_data["outputs"] = p.outputs;
}

// The problem, with the saved operands left in `operands`.
Problem restore(AutogradContext* context, variable_list& operands) {
  operands = context->get_saved_variables();
  const Tensor payload = operands.back();
  operands.pop_back();
  return {payload, context->saved_data["key"].toInt(), context->saved_data["outputs"].toInt()};
}

struct Forward : Function<Forward> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& w, const Problem& p) {
    const at::AutoDispatchBelowADInplaceOrView below;
    save(context, p, {x, w});
    return polynomial(p, x, w);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    variable_list v;
    const Problem p = restore(context, v);
    auto [gx, gw] = polynomial_backward(p, gradients[0], v[0], v[1]);
    return {gx, gw, Tensor()};
  }
};

struct Backward : Function<Backward> {
  static variable_list forward(AutogradContext* context, const Tensor& gz, const Tensor& x, const Tensor& w,
                               const Problem& p) {
    const at::AutoDispatchBelowADInplaceOrView below;
    save(context, p, {gz, x, w});
    auto [gx, gw] = polynomial_backward(p, gz, x, w);
    return {gx, gw};
  }
  static variable_list backward(AutogradContext* context, const variable_list& tangents) {
    variable_list v;
    const Problem p = restore(context, v);
    auto [ggz, gx, gw] = polynomial_double_backward(p, v[0], v[1], v[2], tangents[0], tangents[1]);
    return {ggz, gx, gw, Tensor()};
  }
};

struct DoubleBackward : Function<DoubleBackward> {
  static variable_list forward(AutogradContext* context, const Tensor& gz, const Tensor& x, const Tensor& w,
                               const Tensor& a, const Tensor& c, const Problem& p) {
    const at::AutoDispatchBelowADInplaceOrView below;
    save(context, p, {gz, x, w, a, c});
    auto [ggz, gx, gw] = polynomial_double_backward(p, gz, x, w, a, c);
    return {ggz, gx, gw};
  }
  // The same derivatives of the composed form, whose own torch knows.
  static variable_list backward(AutogradContext* context, const variable_list& incoming) {
    variable_list v;
    const Problem p = restore(context, v);
    const bool recorded = at::GradMode::is_enabled();
    const at::AutoGradMode on(true);
    for (Tensor& operand : v) {
      if (!recorded || !operand.requires_grad()) operand = operand.detach().requires_grad_();
    }
    const Tensor &gz = v[0], &x = v[1], &w = v[2], &a = v[3], &c = v[4];
    const auto first = torch::autograd::grad({composed(p, x, w)}, {x, w}, {gz}, true, true);
    const auto second = torch::autograd::grad({first[0], first[1]}, {gz, x, w}, {a, c}, true, true);
    variable_list gradients = torch::autograd::grad({second[0], second[1], second[2]}, {gz, x, w, a, c}, incoming,
                                                    recorded, recorded, true);
    gradients.emplace_back();
    return gradients;
  }
};

Tensor differentiable(const Tensor& payload, int64_t key, const Tensor& x, const Tensor& w, int64_t outputs) {
  const Problem p{payload, key, outputs};
  if (records_gradient(x, w)) return Forward::apply(x, w, p);
  const at::AutoDispatchBelowADInplaceOrView below;
  return polynomial(p, x, w);
}
First differentiable_backward(const Tensor& payload, int64_t key, const Tensor& gz, const Tensor& x, const Tensor& w,
                              int64_t outputs) {
  const Problem p{payload, key, outputs};
  if (records_gradient(gz, x, w)) {
    const variable_list v = Backward::apply(gz, x, w, p);
    return {v[0], v[1]};
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  return polynomial_backward(p, gz, x, w);
}
Second differentiable_double_backward(const Tensor& payload, int64_t key, const Tensor& gz, const Tensor& x,
                                      const Tensor& w, const Tensor& a, const Tensor& c, int64_t outputs) {
  const Problem p{payload, key, outputs};
  if (records_gradient(gz, x, w, a, c)) {
    const variable_list v = DoubleBackward::apply(gz, x, w, a, c, p);
    return {v[0], v[1], v[2]};
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  return polynomial_double_backward(p, gz, x, w, a, c);
}

// Shapes without data, for fake tensors.
Tensor forward_shape(const Tensor&, int64_t, const Tensor& x, const Tensor&, int64_t outputs) {
  return at::empty_symint({x.sym_size(0), outputs}, x.options());
}
First backward_shape(const Tensor&, int64_t, const Tensor&, const Tensor& x, const Tensor& w, int64_t) {
  return {contiguous_like(x), contiguous_like(w)};
}
Second double_backward_shape(const Tensor&, int64_t, const Tensor& gz, const Tensor& x, const Tensor& w, const Tensor&,
                             const Tensor&, int64_t) {
  return {contiguous_like(gz), contiguous_like(x), contiguous_like(w)};
}

// Under autocast in float32, as tensor products.
Tensor forward_autocast(const Tensor& payload, int64_t key, const Tensor& x, const Tensor& w, int64_t outputs) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto cast = [&](const Tensor& t) { return at::autocast::cached_cast(at::kFloat, t, x.device().type()); };
  return polynomial({payload, key, outputs}, cast(x), cast(w));
}

void register_kernels(torch::Library& library) {
  library.impl("polynomial", forward);
  library.impl("polynomial_backward", backward);
  library.impl("polynomial_double_backward", double_backward);
}
TORCH_LIBRARY_IMPL(eqaccel, CPU, library) { register_kernels(library); }
TORCH_LIBRARY_IMPL(eqaccel, CUDA, library) { register_kernels(library); }
TORCH_LIBRARY_IMPL(eqaccel, Autograd, library) {
  library.impl("polynomial", differentiable);
  library.impl("polynomial_backward", differentiable_backward);
  library.impl("polynomial_double_backward", differentiable_double_backward);
}
TORCH_LIBRARY_IMPL(eqaccel, Meta, library) {
  library.impl("polynomial", forward_shape);
  library.impl("polynomial_backward", backward_shape);
  library.impl("polynomial_double_backward", double_backward_shape);
}
TORCH_LIBRARY_IMPL(eqaccel, AutocastCPU, library) { library.impl("polynomial", forward_autocast); }
TORCH_LIBRARY_IMPL(eqaccel, AutocastCUDA, library) { library.impl("polynomial", forward_autocast); }

}  // namespace
}  // namespace eqaccel::ops

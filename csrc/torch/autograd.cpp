// Derivatives of any order. F(x, y, w) is linear in each operand, so the first derivative is the backward operator, the
// second the double backward operator, and the third a sum of the two; all are called through the dispatcher and are
// differentiable themselves. In C++, because a scripted model in LAMMPS has no Python to find them.
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <array>

#include "call.h"

namespace eqaccel::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

void save(AutogradContext* context, const Problem& p, variable_list operands) {
  operands.push_back(p.payload);
  operands.push_back(p.graph);
  context->save_for_backward(std::move(operands));
  context->saved_data["key"] = p.key;
  context->saved_data["receivers"] = p.receivers;
  context->saved_data["z_dim"] = p.z_dim;
  context->saved_data["mul_ir"] = p.mul_ir;
  context->saved_data["atomic"] = p.atomic;
  context->set_materialize_grads(false);
}

// The problem, with the saved operands left in `operands`.
Problem restore(AutogradContext* context, variable_list& operands) {
  operands = context->get_saved_variables();
  const Tensor graph = operands.back();
  operands.pop_back();
  const Tensor payload = operands.back();
  operands.pop_back();
  auto& data = context->saved_data;
  return {payload,
          data["key"].toInt(),
          graph,
          data["receivers"].toSymInt(),
          data["z_dim"].toInt(),
          data["mul_ir"].toBool(),
          data["atomic"].toBool()};
}

Tensor or_zeros(const Tensor& gradient, const Tensor& like) {
  return gradient.defined() ? gradient : at::zeros_like(like, at::MemoryFormat::Contiguous);
}

void add(Tensor& sum, const Tensor& term) { sum = sum.defined() ? sum + term : term; }

// In the three functions below the problem is one argument, without a gradient; needs_input_grad counts the tensor
// arguments before it.
struct Forward : Function<Forward> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& y, const Tensor& w,
                        const Problem& p) {
    const at::AutoDispatchBelowADInplaceOrView below;
    save(context, p, {x, y, w});
    return tensor_product(p, x, y, w);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const Tensor& gz = gradients[0];
    if (!gz.defined()) return variable_list(4);
    variable_list v;
    const Problem p = restore(context, v);
    auto [gx, gy, gw] = tensor_product_backward(p, gz, v[0], v[1], v[2]);
    return {gx, gy, gw, Tensor()};
  }
};

struct Backward : Function<Backward> {
  static variable_list forward(AutogradContext* context, const Tensor& gz, const Tensor& x, const Tensor& y,
                               const Tensor& w, const Problem& p) {
    const at::AutoDispatchBelowADInplaceOrView below;
    save(context, p, {gz, x, y, w});
    auto [gx, gy, gw] = tensor_product_backward(p, gz, x, y, w);
    return {gx, gy, gw};
  }

  static variable_list backward(AutogradContext* context, const variable_list& tangents) {
    if (!tangents[0].defined() && !tangents[1].defined() && !tangents[2].defined()) return variable_list(5);
    variable_list v;
    const Problem p = restore(context, v);
    auto [ggz, gx, gy, gw] = tensor_product_double_backward(p, v[0], v[1], v[2], v[3], or_zeros(tangents[0], v[1]),
                                                            or_zeros(tangents[1], v[2]), or_zeros(tangents[2], v[3]));
    return {ggz, gx, gy, gw, Tensor()};
  }
};

struct DoubleBackward : Function<DoubleBackward> {
  static variable_list forward(AutogradContext* context, const Tensor& gz, const Tensor& x, const Tensor& y,
                               const Tensor& w, const Tensor& a, const Tensor& b, const Tensor& c,
                               const Problem& p) {
    const at::AutoDispatchBelowADInplaceOrView below;
    save(context, p, {gz, x, y, w, a, b, c});
    auto [ggz, gx, gy, gw] = tensor_product_double_backward(p, gz, x, y, w, a, b, c);
    return {ggz, gx, gy, gw};
  }

  // With incoming (g, p, q, r) for (ggz, gx, gy, gw), what is differentiated is the sum of <G, F(X, Y, W)> over the
  // nine terms below: the first three are <g, ggz>, then two each for <p, gx>, <q, gy> and <r, gw>.
  static variable_list backward(AutogradContext* context, const variable_list& incoming) {
    enum Operand { gz, x, y, w, a, b, c, g, p, q, r };
    constexpr int inputs = 7;
    constexpr std::array<std::array<Operand, 4>, 9> terms{{{g, a, y, w},
                                                           {g, x, b, w},
                                                           {g, x, y, c},
                                                           {gz, p, b, w},
                                                           {gz, p, y, c},
                                                           {gz, a, q, w},
                                                           {gz, x, q, c},
                                                           {gz, a, y, r},
                                                           {gz, x, b, r}}};
    variable_list v;
    const Problem problem = restore(context, v);
    v.insert(v.end(), incoming.begin(), incoming.end());

    variable_list gradients(inputs + 1);
    const auto needed = [&](Operand operand) { return operand < inputs && context->needs_input_grad(operand); };
    for (const auto& [G, X, Y, W] : terms) {
      if (!v[G].defined() || !v[X].defined() || !v[Y].defined() || !v[W].defined()) continue;
      if (needed(G)) add(gradients[G], tensor_product(problem, v[X], v[Y], v[W]));
      if (!needed(X) && !needed(Y) && !needed(W)) continue;
      const auto [gX, gY, gW] = tensor_product_backward(problem, v[G], v[X], v[Y], v[W]);
      if (needed(X)) add(gradients[X], gX);
      if (needed(Y)) add(gradients[Y], gY);
      if (needed(W)) add(gradients[W], gW);
    }
    return gradients;
  }
};

Tensor forward(const Tensor& payload, int64_t key, const Tensor& x, const Tensor& y, const Tensor& w,
               const Tensor& graph, c10::SymInt receivers, int64_t z_dim, bool mul_ir, bool atomic) {
  const Problem p{payload, key, graph, std::move(receivers), z_dim, mul_ir, atomic};
  if (records_gradient(x, y, w)) return Forward::apply(x, y, w, p);
  const at::AutoDispatchBelowADInplaceOrView below;
  return tensor_product(p, x, y, w);
}

Gradients backward(const Tensor& payload, int64_t key, const Tensor& gz, const Tensor& x, const Tensor& y,
                   const Tensor& w, const Tensor& graph, c10::SymInt receivers, int64_t z_dim, bool mul_ir,
                   bool atomic) {
  const Problem p{payload, key, graph, std::move(receivers), z_dim, mul_ir, atomic};
  if (records_gradient(gz, x, y, w)) {
    const variable_list v = Backward::apply(gz, x, y, w, p);
    return {v[0], v[1], v[2]};
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  return tensor_product_backward(p, gz, x, y, w);
}

SecondGradients double_backward(const Tensor& payload, int64_t key, const Tensor& gz, const Tensor& x,
                                const Tensor& y, const Tensor& w, const Tensor& a, const Tensor& b, const Tensor& c,
                                const Tensor& graph, c10::SymInt receivers, int64_t z_dim, bool mul_ir,
                                bool atomic) {
  const Problem p{payload, key, graph, std::move(receivers), z_dim, mul_ir, atomic};
  if (records_gradient(gz, x, y, w, a, b, c)) {
    const variable_list v = DoubleBackward::apply(gz, x, y, w, a, b, c, p);
    return {v[0], v[1], v[2], v[3]};
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  return tensor_product_double_backward(p, gz, x, y, w, a, b, c);
}

TORCH_LIBRARY_IMPL(eqaccel, Autograd, library) {
  library.impl("tensor_product", forward);
  library.impl("tensor_product_backward", backward);
  library.impl("tensor_product_double_backward", double_backward);
}

}  // namespace
}  // namespace eqaccel::ops

// Derivatives of any order. F(x, y, w) is linear in each operand, so the first derivative is the backward operator, the
// second the double backward operator, and the third a sum of the two; all are called through the dispatcher and are
// differentiable themselves. In C++, because a scripted model in LAMMPS has no Python to find them.
//
// Tangents are found by the same operators. The gradient of a function changes along a direction by the product of its
// Hessian, which is symmetric, with the direction, and that is what backward of a gradient computes.
#include <torch/library.h>

#include <array>

#include "differentiate.h"
#include "tensor_product.h"

namespace eqaccel::ops {
namespace {

// What the three operators keep for their derivatives.
struct Kept {
  static constexpr bool is_traceable = false;

  static void save(AutogradContext& context, const TensorProductProblem& p, variable_list operands) {
    operands.push_back(p.payload);
    operands.push_back(p.graph);
    context.save_for_backward(std::move(operands));
    context.saved_data["key"] = p.key;
    context.saved_data["receivers"] = p.receivers;
    context.saved_data["z_dim"] = p.z_dim;
    context.saved_data["mul_ir"] = p.mul_ir;
    context.saved_data["deterministic"] = p.deterministic;
    context.set_materialize_grads(false);
  }

  // The problem, with the saved operands left in `operands`.
  static TensorProductProblem restore(AutogradContext* context, variable_list& operands) {
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
            data["deterministic"].toBool()};
  }
};

variable_list gradients(const TensorProductProblem& p, const Tensor& gz, const Tensor& x, const Tensor& y,
                        const Tensor& w) {
  return listed(tensor_product_backward(p, gz, x, y, w));
}
// a, b and c may be undefined.
variable_list second_gradients(const TensorProductProblem& p, const Tensor& gz, const Tensor& x, const Tensor& y,
                               const Tensor& w, const Tensor& a, const Tensor& b, const Tensor& c) {
  return listed(tensor_product_double_backward(p, gz, x, y, w, or_zeros(a, x), or_zeros(b, y), or_zeros(c, w)));
}

struct Forward : Kept {
  static constexpr auto compute = tensor_product;

  static variable_list backward(AutogradContext* context, const variable_list& incoming) {
    const Tensor& gz = incoming[0];
    if (!gz.defined()) return variable_list(3);
    variable_list v;
    const TensorProductProblem p = restore(context, v);
    return gradients(p, gz, v[0], v[1], v[2]);
  }

  static variable_list tangents(const TensorProductProblem& p, const variable_list& operands,
                                const variable_list& along) {
    variable_list sum(1);
    for (std::size_t i = 0; i < operands.size(); ++i) {
      if (!along[i].defined()) continue;
      variable_list v = operands;
      v[i] = along[i];
      add(sum[0], tensor_product(p, v[0], v[1], v[2]));
    }
    return sum;
  }
};

struct Backward : Kept {
  static constexpr auto compute = tensor_product_backward;

  static variable_list backward(AutogradContext* context, const variable_list& t) {
    if (!any_defined(t)) return variable_list(4);
    variable_list v;
    const TensorProductProblem p = restore(context, v);
    return second_gradients(p, v[0], v[1], v[2], v[3], t[0], t[1], t[2]);
  }

  static variable_list tangents(const TensorProductProblem& p, const variable_list& v, const variable_list& along) {
    variable_list sum(3);
    if (along[0].defined()) add(sum, gradients(p, along[0], v[1], v[2], v[3]));
    if (any_defined({along[1], along[2], along[3]})) {
      variable_list second = second_gradients(p, v[0], v[1], v[2], v[3], along[1], along[2], along[3]);
      second.erase(second.begin());
      add(sum, second);
    }
    return sum;
  }
};

// The gradients of <g, ggz> + <p, gx> + <q, gy> + <r, gw> with respect to the operands of the double backward operator
// for which needed_input(number) holds; `incoming` is g, p, q and r. What is differentiated is the sum of
// <G, F(X, Y, W)> over the nine terms below: the first three are <g, ggz>, then two each for <p, gx>, <q, gy> and
// <r, gw>.
template <class Needed>
variable_list third(const TensorProductProblem& problem, const variable_list& operands, const variable_list& incoming,
                    const Needed& needed_input) {
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
  variable_list v = operands;
  v.insert(v.end(), incoming.begin(), incoming.end());

  variable_list sums(inputs);
  const auto needed = [&](Operand operand) { return operand < inputs && needed_input(operand); };
  for (const auto& [G, X, Y, W] : terms) {
    if (!v[G].defined() || !v[X].defined() || !v[Y].defined() || !v[W].defined()) continue;
    if (needed(G)) add(sums[G], tensor_product(problem, v[X], v[Y], v[W]));
    if (!needed(X) && !needed(Y) && !needed(W)) continue;
    const auto [gX, gY, gW] = tensor_product_backward(problem, v[G], v[X], v[Y], v[W]);
    if (needed(X)) add(sums[X], gX);
    if (needed(Y)) add(sums[Y], gY);
    if (needed(W)) add(sums[W], gW);
  }
  return sums;
}

struct DoubleBackward : Kept {
  static constexpr auto compute = tensor_product_double_backward;

  static variable_list backward(AutogradContext* context, const variable_list& incoming) {
    variable_list v;
    const TensorProductProblem p = restore(context, v);
    return third(p, v, incoming, [&](int operand) { return context->needs_input_grad(operand); });
  }

  static variable_list tangents(const TensorProductProblem& p, const variable_list& v, const variable_list& along) {
    variable_list sum(4);
    if (any_defined({along[4], along[5], along[6]}))
      add(sum, second_gradients(p, v[0], v[1], v[2], v[3], along[4], along[5], along[6]));
    const variable_list direction(along.begin(), along.begin() + 4);
    if (any_defined(direction)) add(sum, third(p, v, direction, [](int operand) { return operand < 4; }));
    return sum;
  }
};

Tensor forward(const Tensor& payload, int64_t key, const Tensor& x, const Tensor& y, const Tensor& w,
               const Tensor& graph, c10::SymInt receivers, int64_t z_dim, bool mul_ir, bool deterministic) {
  const TensorProductProblem p{payload, key, graph, std::move(receivers), z_dim, mul_ir, deterministic};
  return differentiate<Forward>(p, x, y, w);
}

TensorProductGradients backward(const Tensor& payload, int64_t key, const Tensor& gz, const Tensor& x, const Tensor& y,
                                const Tensor& w, const Tensor& graph, c10::SymInt receivers, int64_t z_dim, bool mul_ir,
                                bool deterministic) {
  const TensorProductProblem p{payload, key, graph, std::move(receivers), z_dim, mul_ir, deterministic};
  return differentiate<Backward>(p, gz, x, y, w);
}

TensorProductSecondGradients double_backward(const Tensor& payload, int64_t key, const Tensor& gz, const Tensor& x,
                                             const Tensor& y, const Tensor& w, const Tensor& a, const Tensor& b,
                                             const Tensor& c, const Tensor& graph, c10::SymInt receivers, int64_t z_dim,
                                             bool mul_ir, bool deterministic) {
  const TensorProductProblem p{payload, key, graph, std::move(receivers), z_dim, mul_ir, deterministic};
  return differentiate<DoubleBackward>(p, gz, x, y, w, a, b, c);
}

TORCH_LIBRARY_IMPL(eqaccel, Autograd, library) {
  library.impl("tensor_product", forward);
  library.impl("tensor_product_backward", backward);
  library.impl("tensor_product_double_backward", double_backward);
}

}  // namespace
}  // namespace eqaccel::ops

// Derivatives of polynomials of any order: the first two are operators, and all others are sums of these and of polar
// forms, so that they too are differentiable, and traced as calls of operators. Tangents are found as those of tensor
// products are.
#include <torch/library.h>

#include "differentiate.h"
#include "kept_problem.h"
#include "polynomial.h"

namespace eqaccel::ops {
namespace {
namespace polynomial_autograd_file {

using Kept = KeptProblem<PolynomialProblem>;

variable_list gradients(const PolynomialProblem& p, const Tensor& gz, const Tensor& x, const Tensor& w) {
  return listed(polynomial_backward(p, gz, x, w));
}
// a and c may be undefined.
variable_list second_gradients(const PolynomialProblem& p, const Tensor& gz, const Tensor& x, const Tensor& w,
                               const Tensor& a, const Tensor& c) {
  const Tensor c_or_none = c.defined() ? c : at::empty({0}, w.options());
  return listed(polynomial_double_backward(p, gz, x, w, or_zeros(a, x), c_or_none));
}

struct Forward : Kept {
  static constexpr auto compute = polynomial;

  static variable_list backward(AutogradContext* context, const variable_list& incoming) {
    if (!incoming[0].defined()) return variable_list(2);
    variable_list v;
    const PolynomialProblem p = restore(context, v);
    return gradients(p, incoming[0], v[0], v[1]);
  }

  // <gz, tangent of z> is <x', gx> + <w', gw>, whose gradient with respect to gz the double backward operator gives.
  static variable_list tangents(const PolynomialProblem& p, const variable_list& v, const variable_list& along) {
    const Tensor any_gz = at::zeros_symint({v[0].sym_size(0), p.outputs}, v[0].options());
    return {second_gradients(p, any_gz, v[0], v[1], along[0], along[1])[0]};
  }
};

struct Backward : Kept {
  static constexpr auto compute = polynomial_backward;

  static variable_list backward(AutogradContext* context, const variable_list& t) {
    if (!any_defined(t)) return variable_list(3);
    variable_list v;
    const PolynomialProblem p = restore(context, v);
    return second_gradients(p, v[0], v[1], v[2], t[0], t[1]);
  }

  static variable_list tangents(const PolynomialProblem& p, const variable_list& v, const variable_list& along) {
    variable_list sum(2);
    if (along[0].defined()) add(sum, gradients(p, along[0], v[1], v[2]));
    if (any_defined({along[1], along[2]})) {
      const variable_list second = second_gradients(p, v[0], v[1], v[2], along[1], along[2]);
      add(sum, {second[1], second[2]});
    }
    return sum;
  }
};

// The third derivatives of <gz, P(x, w)> along (a, c) and (q, r), with respect to gz, x and w: the gradients of
//   3 Q(gz, c, q, x, x) + 3 Q(gz, r, a, x, x) + 6 Q(gz, w, a, q, x)
// where Q is the polar form. q or r may be undefined, and so are results that are not needed.
template <class Needed>
variable_list along_both(const PolynomialProblem& p, const Tensor& gz, const Tensor& x, const Tensor& w,
                         const Tensor& a, const Tensor& c, const Tensor& q, const Tensor& r, const Needed& needed) {
  const auto padded = [](const Tensor& t, int last) { return t.defined() ? at::constant_pad_nd(t, {0, 1}, last) : t; };
  const Tensor X = padded(x, 1), A = padded(a, 0), Q = padded(q, 0);
  Tensor of_gz, of_x, of_w;
  const auto add_form = [&](Tensor& sum, double factor, const std::array<Tensor, 4>& factors, int missing,
                            c10::SymInt columns) {
    if (std::all_of(factors.begin(), factors.end(), [](const Tensor& t) { return t.defined(); }))
      add(sum, factor * polynomial_polar_form(p, factors, missing, std::move(columns)));
  };
  if (needed(0)) {
    add_form(of_gz, 3, {c, Q, X, X}, 0, p.outputs);
    add_form(of_gz, 3, {r, A, X, X}, 0, p.outputs);
    add_form(of_gz, 6, {w, A, Q, X}, 0, p.outputs);
  }
  if (needed(1)) {
    add_form(of_x, 6, {gz, c, Q, X}, 4, X.sym_size(1));
    add_form(of_x, 6, {gz, r, A, X}, 4, X.sym_size(1));
    add_form(of_x, 6, {gz, w, A, Q}, 4, X.sym_size(1));
    of_x = of_x.narrow_symint(1, 0, x.sym_size(1));
  }
  if (needed(2)) add_form(of_w, 6, {gz, A, Q, X}, 1, w.sym_size(1));
  return {of_gz, of_x, of_w};
}

// The gradients of <g, ggz> + <q, gx> + <r, gw> with respect to the operands (gz, x, w, a, c) of the double backward
// operator for which needed(number) holds; `incoming` is g, q and r. Parts that depend on gz, x and w through second
// derivatives alone are calls of the first two derivatives.
template <class Needed>
variable_list third(const PolynomialProblem& p, const variable_list& v, const variable_list& incoming,
                    const Needed& needed) {
  const Tensor &gz = v[0], &x = v[1], &w = v[2], &a = v[3];
  const Tensor &g = incoming[0], &q = incoming[1], &r = incoming[2];
  const Tensor c = v[4].dim() == 2 ? v[4] : Tensor();
  variable_list sum(5);
  const bool along = needed(3) || needed(4);
  if (g.defined()) {
    if (needed(1) || needed(2)) {
      const variable_list second = second_gradients(p, g, x, w, a, c);
      add(sum, {Tensor(), second[1], second[2], Tensor(), Tensor()});
    }
    if (along) {
      const variable_list first = gradients(p, g, x, w);
      add(sum, {Tensor(), Tensor(), Tensor(), first[0], first[1]});
    }
  }
  if (any_defined({q, r})) {
    if (along) {
      const variable_list second = second_gradients(p, gz, x, w, q, r);
      add(sum, {Tensor(), Tensor(), Tensor(), second[1], second[2]});
    }
    variable_list both = along_both(p, gz, x, w, a, c, q, r, needed);
    both.resize(sum.size());
    add(sum, both);
  }
  return sum;
}

struct DoubleBackward : Kept {
  static constexpr auto compute = polynomial_double_backward;

  static variable_list backward(AutogradContext* context, const variable_list& incoming) {
    variable_list v;
    const PolynomialProblem p = restore(context, v);
    return third(p, v, incoming, [&](int operand) { return context->needs_input_grad(operand); });
  }

  static variable_list tangents(const PolynomialProblem& p, const variable_list& v, const variable_list& along) {
    variable_list sum(3);
    if (any_defined({along[3], along[4]})) add(sum, second_gradients(p, v[0], v[1], v[2], along[3], along[4]));
    const variable_list direction(along.begin(), along.begin() + 3);
    if (any_defined(direction)) add(sum, third(p, v, direction, [](int operand) { return operand < 3; }));
    return sum;
  }
};

Tensor forward(const Tensor& payload, int64_t key, const Tensor& x, const Tensor& w, int64_t outputs) {
  return differentiate<Forward>(PolynomialProblem{payload, key, outputs}, x, w);
}
PolynomialGradients backward(const Tensor& payload, int64_t key, const Tensor& gz, const Tensor& x, const Tensor& w,
                             int64_t outputs) {
  return differentiate<Backward>(PolynomialProblem{payload, key, outputs}, gz, x, w);
}
PolynomialSecondGradients double_backward(const Tensor& payload, int64_t key, const Tensor& gz, const Tensor& x,
                                          const Tensor& w, const Tensor& a, const Tensor& c, int64_t outputs) {
  return differentiate<DoubleBackward>(PolynomialProblem{payload, key, outputs}, gz, x, w, a, c);
}

TORCH_LIBRARY_IMPL(eqaccel, Autograd, library) {
  library.impl("polynomial", forward);
  library.impl("polynomial_backward", backward);
  library.impl("polynomial_double_backward", double_backward);
}

}  // namespace polynomial_autograd_file
}  // namespace
}  // namespace eqaccel::ops

// eqaccel::polynomial and its derivatives as C++ calls through torch's dispatcher.
#pragma once
#include <array>
#include <tuple>

#include "operators.h"

namespace eqaccel::ops {

// Everything about a polynomial that is not a differentiable operand.
struct PolynomialProblem {
  Tensor payload;   // sources of the kernels and the terms, uint8
  int64_t key;      // names the payload in the process-wide table of programs
  int64_t outputs;  // columns of z: shapes must be known where the payload can not be read

  template <class Self, class Run>
  static void each(Self& p, const Run& run) {  // for KeptProblem
    run("key", p.key);
    run("outputs", p.outputs);
  }
};

using PolynomialGradients = std::tuple<Tensor, Tensor>;                // with respect to x and w
using PolynomialSecondGradients = std::tuple<Tensor, Tensor, Tensor>;  // with respect to gz, x and w

// z = P(x, w), row by row.
Tensor polynomial(const PolynomialProblem&, const Tensor& x, const Tensor& w);
// Gradients of <gz, P(x, w)>.
PolynomialGradients polynomial_backward(const PolynomialProblem&, const Tensor& gz, const Tensor& x, const Tensor& w);
// Gradients of <a, gx> + <c, gw>, where gx and gw are what polynomial_backward gives.
PolynomialSecondGradients polynomial_double_backward(const PolynomialProblem&, const Tensor& gz, const Tensor& x,
                                                     const Tensor& w, const Tensor& a, const Tensor& c);

// The polar form <gz, Q(w, f, g, h)>, of which <gz, P(x, w)> is the value for f = g = h = (x, 1): linear in each of gz,
// w, f, g and h, and symmetric in the last three, which have a column more than x. Given four of these, in this order,
// it is the derivative by the fifth, number `missing` (0 for gz, to 4), which has `columns` columns. Any derivative of P
// is a sum of such.
Tensor polynomial_polar_form(const PolynomialProblem&, const std::array<Tensor, 4>& factors, int64_t missing,
                             c10::SymInt columns);

}  // namespace eqaccel::ops

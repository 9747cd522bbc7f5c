// eqaccel::radial_basis and its derivatives as C++ calls through torch's dispatcher.
#pragma once
#include <tuple>

#include "operators.h"

namespace eqaccel::ops {

// Functions f_n(x) = factor * sin(unit * w_n * x) / x * u(x), u the polynomial cutoff: see eqaccel/families/radial_basis/spec.py.
struct RadialProblem {
  Tensor payload;  // sources of the kernels, uint8
  int64_t key;     // names the payload in the process-wide table of programs
  // These are in the kernels too; derivatives beyond the second need them here.
  double factor, r_max, unit;
  int64_t power;

  template <class Self, class Run>
  static void each(Self& p, const Run& run) {  // for KeptProblem
    run("key", p.key);
    run("factor", p.factor);
    run("r_max", p.r_max);
    run("unit", p.unit);
    run("power", p.power);
  }
};

using RadialGradients = std::tuple<Tensor, Tensor>;                // with respect to x and w
using RadialSecondGradients = std::tuple<Tensor, Tensor, Tensor>;  // with respect to gz, x and w

// z = f(x; w), row by row; w is the same for all rows.
Tensor radial_basis(const RadialProblem&, const Tensor& x, const Tensor& w);
// Gradients of <gz, f(x; w)>; that with respect to w only if `of_w` says so.
RadialGradients radial_basis_backward(const RadialProblem&, bool of_w, const Tensor& gz, const Tensor& x,
                                      const Tensor& w);
// Gradients of <a, gx> + <c, gw>, where gx and gw are what radial_basis_backward gives; c of no elements is zero.
RadialSecondGradients radial_basis_double_backward(const RadialProblem&, bool of_w, const Tensor& gz, const Tensor& x,
                                                   const Tensor& w, const Tensor& a, const Tensor& c);

}  // namespace eqaccel::ops

// Derivatives of radial basis functions of any order: the first two are operators. Where the second is differentiated
// itself, it is composed of torch's operators.
#include <torch/library.h>

#include "differentiate.h"
#include "kept_problem.h"
#include "radial_basis.h"

namespace eqaccel::ops {
namespace {
namespace radial_basis_autograd_file {

using Kept = KeptProblem<RadialProblem>;

// An operator leaves out what is not wanted as a tensor without elements; autograd wants none.
variable_list wanted(variable_list gradients, bool of_w) {
  if (!of_w) gradients.back() = Tensor();
  return gradients;
}
variable_list gradients(const RadialProblem& p, bool of_w, const Tensor& gz, const Tensor& x, const Tensor& w) {
  return wanted(listed(radial_basis_backward(p, of_w, gz, x, w)), of_w);
}
// a and c may be undefined.
variable_list second_gradients(const RadialProblem& p, bool of_w, const Tensor& gz, const Tensor& x, const Tensor& w,
                               const Tensor& a, const Tensor& c) {
  const Tensor c_or_none = c.defined() ? c : at::empty({0}, w.options());
  return wanted(listed(radial_basis_double_backward(p, of_w, gz, x, w, or_zeros(a, x), c_or_none)), of_w);
}

struct Forward : Kept {
  static constexpr auto compute = radial_basis;

  static variable_list backward(AutogradContext* context, const variable_list& incoming) {
    if (!incoming[0].defined()) return variable_list(2);
    variable_list v;
    const RadialProblem p = restore(context, v);
    return gradients(p, context->needs_input_grad(1), incoming[0], v[0], v[1]);
  }

  // <gz, tangent of z> is <x', gx> + <w', gw>, whose gradient with respect to gz the double backward operator gives.
  static variable_list tangents(const RadialProblem& p, const variable_list& v, const variable_list& along) {
    const c10::SymInt outputs = v[1].sym_size(0) > 0 ? v[1].sym_size(0) : c10::SymInt(1);
    const Tensor any_gz = at::zeros_symint({v[0].sym_size(0), outputs}, v[0].options());
    return {second_gradients(p, false, any_gz, v[0], v[1], along[0], along[1])[0]};
  }
};

struct BackwardProblem {
  RadialProblem functions;
  bool of_w;
};

struct Backward : Kept {
  static RadialGradients compute(const BackwardProblem& p, const Tensor& gz, const Tensor& x, const Tensor& w) {
    return radial_basis_backward(p.functions, p.of_w, gz, x, w);
  }
  static void save(AutogradContext& context, const BackwardProblem& p, variable_list operands) {
    Kept::save(context, p.functions, std::move(operands));
    context.saved_data["of_w"] = p.of_w;
  }

  static variable_list backward(AutogradContext* context, const variable_list& t) {
    if (!any_defined(t)) return variable_list(3);
    variable_list v;
    const RadialProblem p = restore(context, v);
    const Tensor along_w = context->saved_data["of_w"].toBool() ? t[1] : Tensor();
    return second_gradients(p, context->needs_input_grad(2), v[0], v[1], v[2], t[0], along_w);
  }

  static variable_list tangents(const BackwardProblem& p, const variable_list& v, const variable_list& along) {
    variable_list sum(2);
    if (along[0].defined()) add(sum, gradients(p.functions, p.of_w, along[0], v[1], v[2]));
    if (any_defined({along[1], along[2]})) {
      const variable_list second = second_gradients(p.functions, p.of_w, v[0], v[1], v[2], along[1], along[2]);
      add(sum, {second[1], second[2]});
    }
    return sum;
  }
};

// A function of x and its derivatives.
struct Radial {
  Tensor value, slope, curvature;
};

Radial cutoff(const RadialProblem& p, const Tensor& x) {
  const Tensor one = at::ones_like(x);
  if (p.power == 0) return {one, at::zeros_like(x), at::zeros_like(x)};
  const double n = static_cast<double>(p.power), steep = -n * (n + 1) * (n + 2) / 2;
  const Tensor inside = x < p.r_max, y = at::where(inside, x / p.r_max, one);
  const Tensor left = at::where(inside, (p.r_max - x) / p.r_max, at::zeros_like(x));
  Tensor sum = at::zeros_like(x);
  for (int64_t j = p.power; j > 0; --j) sum = sum * y + static_cast<double>(j) * static_cast<double>(j + 1) / 2;
  const Tensor low = steep * y.pow(p.power - 2) * left;
  return {left.pow(3) * sum, low * y * left / p.r_max, low * ((n - 1) * left - 2 * y) / (p.r_max * p.r_max)};
}

// The double backward operator in torch's operators.
RadialSecondGradients composed(const RadialProblem& p, bool of_w, const Tensor& gz, const Tensor& x, const Tensor& w,
                               const Tensor& a, const Tensor& c) {
  const Radial u = cutoff(p, x);
  const Tensor g = p.factor * gz;
  if (w.sym_size(0) == 0) return {p.factor * a * u.slope, g * a * u.curvature, at::empty({0}, w.options())};
  const Tensor k = p.unit * w, sine = at::sin(x * k), cosine = at::cos(x * k);
  const Tensor value = sine / x, slope = (k * cosine - value) / x, curvature = -k * k * value - 2 * slope / x;
  const Tensor f_r = slope * u.value + value * u.slope, f_k = cosine * u.value;
  const Tensor f_rr = curvature * u.value + 2 * slope * u.slope + value * u.curvature;
  const Tensor f_rk = cosine * u.slope - k * sine * u.value, f_kk = -x * sine * u.value;
  const Tensor along = c.sym_size(0) > 0 ? p.unit * c : at::zeros_like(w);
  return {p.factor * (a * f_r + along * f_k), (g * (a * f_rr + along * f_rk)).sum(1, /*keepdim=*/true),
          of_w ? p.unit * (g * (a * f_rk + along * f_kk)).sum(0) : at::empty({0}, w.options())};
}

Tensor forward(const Tensor& payload, int64_t key, const Tensor& x, const Tensor& w, double factor, double r_max,
               double unit, int64_t power) {
  return differentiate<Forward>(RadialProblem{payload, key, factor, r_max, unit, power}, x, w);
}
RadialGradients backward(const Tensor& payload, int64_t key, const Tensor& gz, const Tensor& x, const Tensor& w,
                         double factor, double r_max, double unit, int64_t power, bool of_w) {
  return differentiate<Backward>(BackwardProblem{{payload, key, factor, r_max, unit, power}, of_w}, gz, x, w);
}
RadialSecondGradients double_backward(const Tensor& payload, int64_t key, const Tensor& gz, const Tensor& x,
                                      const Tensor& w, const Tensor& a, const Tensor& c, double factor, double r_max,
                                      double unit, int64_t power, bool of_w) {
  const RadialProblem p{payload, key, factor, r_max, unit, power};
  if (records_gradient(gz, x, w, a, c) || has_tangent(gz, x, w, a, c)) return composed(p, of_w, gz, x, w, a, c);
  const at::AutoDispatchBelowADInplaceOrView below;
  return radial_basis_double_backward(p, of_w, gz, x, w, a, c);
}

TORCH_LIBRARY_IMPL(eqaccel, Autograd, library) {
  library.impl("radial_basis", forward);
  library.impl("radial_basis_backward", backward);
  library.impl("radial_basis_double_backward", double_backward);
}

}  // namespace radial_basis_autograd_file
}  // namespace
}  // namespace eqaccel::ops

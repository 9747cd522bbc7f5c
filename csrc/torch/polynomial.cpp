// eqaccel::polynomial and its first two derivatives: each row of z is a polynomial in the features x of the same row
// with coefficients w of its own. Each is one kernel.
#include "polynomial.h"

#include <torch/library.h>

#include "row_call.h"

namespace eqaccel::ops {

Tensor polynomial(const PolynomialProblem& p, const Tensor& x, const Tensor& w) {
  using Signature = Tensor(const Tensor&, int64_t, const Tensor&, const Tensor&, int64_t);
  static const auto op = find_operator<Signature>("eqaccel::polynomial");
  return op.call(p.payload, p.key, x, w, p.outputs);
}
PolynomialGradients polynomial_backward(const PolynomialProblem& p, const Tensor& gz, const Tensor& x,
                                        const Tensor& w) {
  using Signature = PolynomialGradients(const Tensor&, int64_t, const Tensor&, const Tensor&, const Tensor&, int64_t);
  static const auto op = find_operator<Signature>("eqaccel::polynomial_backward");
  return op.call(p.payload, p.key, gz, x, w, p.outputs);
}
PolynomialSecondGradients polynomial_double_backward(const PolynomialProblem& p, const Tensor& gz, const Tensor& x,
                                                     const Tensor& w, const Tensor& a, const Tensor& c) {
  using Signature = PolynomialSecondGradients(const Tensor&, int64_t, const Tensor&, const Tensor&, const Tensor&,
                                              const Tensor&, const Tensor&, int64_t);
  static const auto op = find_operator<Signature>("eqaccel::polynomial_double_backward");
  return op.call(p.payload, p.key, gz, x, w, a, c, p.outputs);
}

namespace {
namespace polynomial_file {

class PolynomialCall : public RowCall {
 public:
  PolynomialCall(const char* op, const PolynomialProblem& problem, const Tensor& x, const Tensor& w)
      : RowCall(op, problem.payload, problem.key, x) {
    TORCH_CHECK(problem.outputs == program_->number("z_dim"), op, ": argument 'num_outputs' must be ",
                program_->number("z_dim"), ", as in the payload, got ", problem.outputs,
                ". Pass the values of one module.");
    ops_.w = rows("w", w, "w_dim");
  }
};

Tensor forward(const Tensor& payload, int64_t key, const Tensor& x, const Tensor& w, int64_t outputs) {
  PolynomialCall call("eqaccel::polynomial", {payload, key, outputs}, x, w);
  const Tensor z = call.new_rows("z_dim");
  call.operands().z = z.mutable_data_ptr();
  call.launch(Direction::forward);
  return z;
}

PolynomialGradients backward(const Tensor& payload, int64_t key, const Tensor& gz, const Tensor& x, const Tensor& w,
                             int64_t outputs) {
  PolynomialCall call("eqaccel::polynomial_backward", {payload, key, outputs}, x, w);
  call.operands().gz = call.rows("gz", gz, "z_dim");
  const Tensor gx = call.new_rows("x_dim"), gw = call.new_rows("w_dim");
  call.operands().gx = gx.mutable_data_ptr();
  call.operands().gw = gw.mutable_data_ptr();
  call.launch(Direction::backward);
  return {gx, gw};
}

PolynomialSecondGradients double_backward(const Tensor& payload, int64_t key, const Tensor& gz, const Tensor& x,
                                          const Tensor& w, const Tensor& a, const Tensor& c, int64_t outputs) {
  PolynomialCall call("eqaccel::polynomial_double_backward", {payload, key, outputs}, x, w);
  eq_operands& ops = call.operands();
  ops.gz = call.rows("gz", gz, "z_dim");
  ops.a = call.rows("a", a, "x_dim");
  ops.c = c.dim() == 1 && c.numel() == 0 ? nullptr : call.rows("c", c, "w_dim");
  const Tensor ggz = call.new_rows("z_dim"), gx = call.new_rows("x_dim"), gw = call.new_rows("w_dim");
  ops.z = ggz.mutable_data_ptr();
  ops.gx = gx.mutable_data_ptr();
  ops.gw = gw.mutable_data_ptr();
  call.launch(Direction::double_backward);
  return {ggz, gx, gw};
}

// Shapes without data, for fake tensors.
Tensor forward_shape(const Tensor&, int64_t, const Tensor& x, const Tensor&, int64_t outputs) {
  return stand_in({x.sym_size(0), outputs}, x);
}
PolynomialGradients backward_shape(const Tensor&, int64_t, const Tensor&, const Tensor& x, const Tensor& w, int64_t) {
  return {stand_in(x), stand_in(w)};
}
PolynomialSecondGradients double_backward_shape(const Tensor&, int64_t, const Tensor& gz, const Tensor& x,
                                                const Tensor& w, const Tensor&, const Tensor&, int64_t) {
  return {stand_in(gz), stand_in(x), stand_in(w)};
}

// Under autocast in float32, as tensor products.
Tensor forward_autocast(const Tensor& payload, int64_t key, const Tensor& x, const Tensor& w, int64_t outputs) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto cast = [&](const Tensor& t) { return cast_to_float32(t, x); };
  return polynomial({payload, key, outputs}, cast(x), cast(w));
}

void register_kernels(torch::Library& library) {
  library.impl("polynomial", forward);
  library.impl("polynomial_backward", backward);
  library.impl("polynomial_double_backward", double_backward);
}
TORCH_LIBRARY_IMPL(eqaccel, CPU, library) { register_kernels(library); }
TORCH_LIBRARY_IMPL(eqaccel, CUDA, library) { register_kernels(library); }
TORCH_LIBRARY_IMPL(eqaccel, Meta, library) {
  library.impl("polynomial", forward_shape);
  library.impl("polynomial_backward", backward_shape);
  library.impl("polynomial_double_backward", double_backward_shape);
}
TORCH_LIBRARY_IMPL(eqaccel, AutocastCPU, library) { library.impl("polynomial", forward_autocast); }
TORCH_LIBRARY_IMPL(eqaccel, AutocastCUDA, library) { library.impl("polynomial", forward_autocast); }

}  // namespace polynomial_file
}  // namespace
}  // namespace eqaccel::ops

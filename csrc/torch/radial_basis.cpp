// eqaccel::radial_basis and its first two derivatives: functions of the length of an edge, a row for each. Each is one
// kernel, but for the sum over rows that the gradient with respect to frequencies is.
#include "radial_basis.h"

#include <torch/library.h>

#include "row_call.h"

namespace eqaccel::ops {

Tensor radial_basis(const RadialProblem& p, const Tensor& x, const Tensor& w) {
  using Signature = Tensor(const Tensor&, int64_t, const Tensor&, const Tensor&, double, double, double, int64_t);
  static const auto op = find_operator<Signature>("eqaccel::radial_basis");
  return op.call(p.payload, p.key, x, w, p.factor, p.r_max, p.unit, p.power);
}
RadialGradients radial_basis_backward(const RadialProblem& p, bool of_w, const Tensor& gz, const Tensor& x,
                                      const Tensor& w) {
  using Signature = RadialGradients(const Tensor&, int64_t, const Tensor&, const Tensor&, const Tensor&, double, double,
                                    double, int64_t, bool);
  static const auto op = find_operator<Signature>("eqaccel::radial_basis_backward");
  return op.call(p.payload, p.key, gz, x, w, p.factor, p.r_max, p.unit, p.power, of_w);
}
RadialSecondGradients radial_basis_double_backward(const RadialProblem& p, bool of_w, const Tensor& gz, const Tensor& x,
                                                   const Tensor& w, const Tensor& a, const Tensor& c) {
  using Signature = RadialSecondGradients(const Tensor&, int64_t, const Tensor&, const Tensor&, const Tensor&,
                                          const Tensor&, const Tensor&, double, double, double, int64_t, bool);
  static const auto op = find_operator<Signature>("eqaccel::radial_basis_double_backward");
  return op.call(p.payload, p.key, gz, x, w, a, c, p.factor, p.r_max, p.unit, p.power, of_w);
}

namespace {
namespace radial_basis_file {

class RadialCall : public RowCall {
 public:
  RadialCall(const char* op, const Tensor& payload, int64_t key, const Tensor& x, const Tensor& w)
      : RowCall(op, payload, key, x) {
    ops_.w = frequencies("w", w);  // strides are zero: one row for all
  }

  const void* frequencies(const char* name, const Tensor& t) {
    check_kind(name, t);
    TORCH_CHECK(t.dim() == 1 && t.size(0) == program_->number("w_dim"), op_, ": argument '", name,
                "' must have shape (", program_->number("w_dim"), "), got ", t.sizes(),
                ". Pass the frequencies of the module that the operand is for.");
    return t.numel() > 0 ? held(t) : nullptr;
  }

  // Launches with room for the gradients of each row with respect to frequencies, if wanted, and adds them up.
  Tensor launch_with_frequencies(Direction direction, bool of_w) {
    Tensor gw;
    if (of_w) {
      gw = new_rows("w_dim");
      ops_.gw = gw.mutable_data_ptr();
    }
    launch(direction);
    return of_w ? gw.sum(0) : at::empty({0}, like_.options());
  }
};

Tensor forward(const Tensor& payload, int64_t key, const Tensor& x, const Tensor& w, double, double, double, int64_t) {
  RadialCall call("eqaccel::radial_basis", payload, key, x, w);
  const Tensor z = call.new_rows("z_dim");
  call.operands().z = z.mutable_data_ptr();
  call.launch(Direction::forward);
  return z;
}

RadialGradients backward(const Tensor& payload, int64_t key, const Tensor& gz, const Tensor& x, const Tensor& w, double,
                         double, double, int64_t, bool of_w) {
  RadialCall call("eqaccel::radial_basis_backward", payload, key, x, w);
  call.operands().gz = call.rows("gz", gz, "z_dim");
  const Tensor gx = call.new_rows("x_dim");
  call.operands().gx = gx.mutable_data_ptr();
  return {gx, call.launch_with_frequencies(Direction::backward, of_w)};
}

RadialSecondGradients double_backward(const Tensor& payload, int64_t key, const Tensor& gz, const Tensor& x,
                                      const Tensor& w, const Tensor& a, const Tensor& c, double, double, double,
                                      int64_t, bool of_w) {
  RadialCall call("eqaccel::radial_basis_double_backward", payload, key, x, w);
  eq_operands& ops = call.operands();
  ops.gz = call.rows("gz", gz, "z_dim");
  ops.a = call.rows("a", a, "x_dim");
  ops.c = c.numel() > 0 ? call.frequencies("c", c) : nullptr;
  const Tensor ggz = call.new_rows("z_dim"), gx = call.new_rows("x_dim");
  ops.z = ggz.mutable_data_ptr();
  ops.gx = gx.mutable_data_ptr();
  return {ggz, gx, call.launch_with_frequencies(Direction::double_backward, of_w)};
}

// Shapes without data, for fake tensors.
Tensor shape_of_w(const Tensor& w, bool of_w) { return of_w ? stand_in(w) : stand_in({c10::SymInt(0)}, w); }
Tensor forward_shape(const Tensor&, int64_t, const Tensor& x, const Tensor& w, double, double, double, int64_t) {
  return stand_in({x.sym_size(0), w.sym_size(0) > 0 ? w.sym_size(0) : c10::SymInt(1)}, x);
}
RadialGradients backward_shape(const Tensor&, int64_t, const Tensor&, const Tensor& x, const Tensor& w, double, double,
                               double, int64_t, bool of_w) {
  return {stand_in(x), shape_of_w(w, of_w)};
}
RadialSecondGradients double_backward_shape(const Tensor&, int64_t, const Tensor& gz, const Tensor& x, const Tensor& w,
                                            const Tensor&, const Tensor&, double, double, double, int64_t, bool of_w) {
  return {stand_in(gz), stand_in(x), shape_of_w(w, of_w)};
}

// Under autocast in float32, as tensor products.
Tensor forward_autocast(const Tensor& payload, int64_t key, const Tensor& x, const Tensor& w, double factor,
                        double r_max, double unit, int64_t power) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto cast = [&](const Tensor& t) { return cast_to_float32(t, x); };
  return radial_basis({payload, key, factor, r_max, unit, power}, cast(x), cast(w));
}

void register_kernels(torch::Library& library) {
  library.impl("radial_basis", forward);
  library.impl("radial_basis_backward", backward);
  library.impl("radial_basis_double_backward", double_backward);
}
TORCH_LIBRARY_IMPL(eqaccel, CPU, library) { register_kernels(library); }
TORCH_LIBRARY_IMPL(eqaccel, CUDA, library) { register_kernels(library); }
TORCH_LIBRARY_IMPL(eqaccel, Meta, library) {
  library.impl("radial_basis", forward_shape);
  library.impl("radial_basis_backward", backward_shape);
  library.impl("radial_basis_double_backward", double_backward_shape);
}
TORCH_LIBRARY_IMPL(eqaccel, AutocastCPU, library) { library.impl("radial_basis", forward_autocast); }
TORCH_LIBRARY_IMPL(eqaccel, AutocastCUDA, library) { library.impl("radial_basis", forward_autocast); }

}  // namespace radial_basis_file
}  // namespace
}  // namespace eqaccel::ops

// eqaccel::radial_layer, factor * SiLU(scale * x w) of few columns, and its gradient with respect to x: a kernel each,
// which make the sums anew. Other derivatives are composed of torch's operators.
#include <torch/library.h>

#include "differentiate.h"
#include "kept_problem.h"
#include "logistic.h"
#include "row_call.h"
#include "silu.h"

namespace eqaccel::ops {
namespace {
namespace radial_layer_file {

using Problem = SiluSource;

Tensor call_forward(const Problem& p, const Tensor& x, const Tensor& w) {
  using Signature = Tensor(const Tensor&, int64_t, const Tensor&, const Tensor&, double, double);
  static const auto op = find_operator<Signature>("eqaccel::radial_layer");
  return op.call(p.payload, p.key, x, w, p.factor, p.scale);
}
Tensor call_backward(const Problem& p, const Tensor& gz, const Tensor& x, const Tensor& w) {
  using Signature = Tensor(const Tensor&, int64_t, const Tensor&, const Tensor&, const Tensor&, double, double);
  static const auto op = find_operator<Signature>("eqaccel::radial_layer_backward");
  return op.call(p.payload, p.key, gz, x, w, p.factor, p.scale);
}

class LayerCall : public RowCall {
 public:
  LayerCall(const char* op, const Tensor& payload, int64_t key, const Tensor& x, const Tensor& w)
      : RowCall(op, payload, key, x) {
    const int64_t inputs = program_->number("x_dim"), outputs = program_->number("z_dim");
    check_kind("w", w);
    TORCH_CHECK(w.dim() == 2 && w.size(0) == inputs && w.size(1) == outputs, op, ": argument 'w' must have shape (",
                inputs, ", ", outputs, "), got ", w.sizes(), ". Pass the weights of the layer that it was made for.");
    const int64_t rows = program_->number("thread_rows"), groups = (x.size(0) + rows - 1) / rows;
    ops_.num_edges = groups * program_->number("lanes_of_row");
    ops_.w = held(w);
  }
};

Tensor run_forward(const Tensor& payload, int64_t key, const Tensor& x, const Tensor& w, double, double) {
  LayerCall call("eqaccel::radial_layer", payload, key, x, w);
  const Tensor z = call.new_rows("z_dim");
  call.operands().z = z.mutable_data_ptr();
  call.launch(Direction::forward);
  return z;
}
Tensor run_backward(const Tensor& payload, int64_t key, const Tensor& gz, const Tensor& x, const Tensor& w, double,
                    double) {
  LayerCall call("eqaccel::radial_layer_backward", payload, key, x, w);
  call.operands().gz = call.rows("gz", gz, "z_dim");
  const Tensor gx = call.new_rows("x_dim");
  call.operands().gx = gx.mutable_data_ptr();
  call.launch(Direction::backward);
  return gx;
}

// The derivative of the activation at x w.
Tensor slope(const Problem& p, const Tensor& x, const Tensor& w) {
  return p.factor * p.scale * Logistic(p.scale * at::mm(x, w)).silu_slope();
}
Tensor composed_backward(const Problem& p, const Tensor& gz, const Tensor& x, const Tensor& w) {
  return at::mm(gz * slope(p, x, w), w.t());
}

struct Layer : KeptProblem<Problem> {
  static constexpr auto compute = call_forward;

  static variable_list backward(AutogradContext* context, const variable_list& incoming) {
    variable_list results(2);
    if (!incoming[0].defined()) return results;
    variable_list v;
    const Problem p = restore(context, v);
    if (context->needs_input_grad(0)) results[0] = call_backward(p, incoming[0], v[0], v[1]);
    if (context->needs_input_grad(1)) results[1] = at::mm(v[0].t(), incoming[0] * slope(p, v[0], v[1]));
    return results;
  }
  static variable_list tangents(const Problem& p, const variable_list& v, const variable_list& along) {
    variable_list sum(1);
    if (along[0].defined()) add(sum[0], at::mm(along[0], v[1]));
    if (along[1].defined()) add(sum[0], at::mm(v[0], along[1]));
    return {slope(p, v[0], v[1]) * sum[0]};
  }
};

Tensor forward(const Tensor& payload, int64_t key, const Tensor& x, const Tensor& w, double factor, double scale) {
  return differentiate<Layer>(Problem{payload, key, factor, scale}, x, w);
}
Tensor backward(const Tensor& payload, int64_t key, const Tensor& gz, const Tensor& x, const Tensor& w, double factor,
                double scale) {
  const Problem p{payload, key, factor, scale};
  if (records_gradient(gz, x, w) || has_tangent(gz, x, w)) return composed_backward(p, gz, x, w);
  const at::AutoDispatchBelowADInplaceOrView below;
  return call_backward(p, gz, x, w);
}

// Shapes without data, for fake tensors.
Tensor forward_shape(const Tensor&, int64_t, const Tensor& x, const Tensor& w, double, double) {
  return stand_in({x.sym_size(0), w.sym_size(1)}, x);
}
Tensor backward_shape(const Tensor&, int64_t, const Tensor&, const Tensor& x, const Tensor&, double, double) {
  return stand_in(x);
}

// Under autocast in float32, as tensor products.
Tensor forward_autocast(const Tensor& payload, int64_t key, const Tensor& x, const Tensor& w, double factor,
                        double scale) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return call_forward({payload, key, factor, scale}, cast_to_float32(x, x), cast_to_float32(w, x));
}

void register_kernels(torch::Library& library) {
  library.impl("radial_layer", run_forward);
  library.impl("radial_layer_backward", run_backward);
}
TORCH_LIBRARY_IMPL(eqaccel, CPU, library) { register_kernels(library); }
TORCH_LIBRARY_IMPL(eqaccel, CUDA, library) { register_kernels(library); }
TORCH_LIBRARY_IMPL(eqaccel, Autograd, library) {
  library.impl("radial_layer", forward);
  library.impl("radial_layer_backward", backward);
}
TORCH_LIBRARY_IMPL(eqaccel, Meta, library) {
  library.impl("radial_layer", forward_shape);
  library.impl("radial_layer_backward", backward_shape);
}
TORCH_LIBRARY_IMPL(eqaccel, AutocastCPU, library) { library.impl("radial_layer", forward_autocast); }
TORCH_LIBRARY_IMPL(eqaccel, AutocastCUDA, library) { library.impl("radial_layer", forward_autocast); }

}  // namespace radial_layer_file
}  // namespace
}  // namespace eqaccel::ops

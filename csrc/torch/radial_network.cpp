// eqaccel::radial_network, layers of factor * SiLU(scale * x w) one after another, and the gradient with respect to x: a
// kernel each on GPUs with tensor cores, which keep nothing and make the features of layers anew. Elsewhere, and for
// other derivatives, they are composed of torch's operators.
#include <torch/library.h>

#include <vector>

#include "differentiate.h"
#include "families.h"
#include "gpu_driver.h"
#include "kept_problem.h"
#include "logistic.h"
#include "row_call.h"

namespace eqaccel::ops {
namespace {
namespace radial_network_file {

using Numbers = c10::ArrayRef<double>;

// What a call is given besides tensors.
struct Problem {
  Tensor payload;
  int64_t key;
  std::vector<int64_t> widths;  // columns of x, and of the features of each layer
  std::vector<double> factors, scales;

  template <class Self, class Run>
  static void each(Self& p, const Run& run) {  // for KeptProblem
    run("key", p.key);
    run("widths", p.widths);
    run("factors", p.factors);
    run("scales", p.scales);
  }
  int64_t layers() const { return static_cast<int64_t>(factors.size()); }
};

template <class... Tensors>
Tensor call(const char* name, const Problem& p, const Tensors&... operands) {
  using Signature = Tensor(const Tensor&, int64_t, const Tensors&..., c10::IntArrayRef, Numbers, Numbers);
  const auto op = find_operator<Signature>(name);
  return op.call(p.payload, p.key, operands..., p.widths, p.factors, p.scales);
}
Tensor call_forward(const Problem& p, const Tensor& x, const Tensor& w) {
  return call("eqaccel::radial_network", p, x, w);
}
Tensor call_backward(const Problem& p, const Tensor& gz, const Tensor& x, const Tensor& w) {
  return call("eqaccel::radial_network_backward", p, gz, x, w);
}

// The weights of layers, (inputs, outputs) each.
variable_list matrices(const Problem& p, const Tensor& w) {
  variable_list found;
  for (int64_t n = 0, first = 0; n < p.layers(); ++n) {
    const int64_t size = p.widths[n] * p.widths[n + 1];
    found.push_back(w.narrow(0, first, size).view({p.widths[n], p.widths[n + 1]}));
    first += size;
  }
  return found;
}

// A network composed of torch's operators: what layers are given, and the slopes of their activations.
struct Composed {
  Composed(const Problem& problem, const Tensor& x, const Tensor& w) : p(problem), weights(matrices(p, w)) {
    Tensor features = x;
    for (int64_t n = 0; n < p.layers(); ++n) {
      given.push_back(features);
      const Logistic at(p.scales[n] * at::mm(features, weights[n]));
      features = p.factors[n] * at.y * at.of;
      slopes.push_back(p.factors[n] * p.scales[n] * at.silu_slope());
    }
    z = features;
  }

  // The gradient by x; those by the weights of layers go to a list, if there is one.
  Tensor gradient(const Tensor& gz, variable_list* of_weights = nullptr) const {
    Tensor g = gz;
    for (int64_t n = p.layers(); n-- > 0;) {
      g = g * slopes[n];
      if (of_weights) of_weights->insert(of_weights->begin(), at::mm(given[n].t(), g).flatten());
      g = at::mm(g, weights[n].t());
    }
    return g;
  }

  // The tangent of z along tangents of x and w, either of which may be undefined.
  Tensor tangent(const Tensor& of_x, const Tensor& of_w) const {
    const variable_list along = of_w.defined() ? matrices(p, of_w) : variable_list(weights.size());
    Tensor moved = of_x;
    for (int64_t n = 0; n < p.layers(); ++n) {
      Tensor sum;
      if (moved.defined()) add(sum, at::mm(moved, weights[n]));
      if (along[n].defined()) add(sum, at::mm(given[n], along[n]));
      moved = slopes[n] * sum;
    }
    return moved;
  }

  const Problem& p;
  variable_list weights, given, slopes;
  Tensor z;
};

class NetworkCall : public RowCall {
 public:
  NetworkCall(const char* op, const Tensor& payload, int64_t key, const Tensor& x, const Tensor& w)
      : RowCall(op, payload, key, x) {
    check_kind("w", w);
    const int64_t weights = program_->number("w_dim");
    TORCH_CHECK(w.dim() == 1 && w.size(0) == weights, op, ": argument 'w' must have shape (", weights, "), got ",
                w.sizes(), ". Pass the weights of all layers, one after the other.");
    ops_.w = held(w);
  }

  // Deals the rows out to threads, for a kernel that there is; false if there is none.
  bool prepare(Direction direction) {
    const c10::Device device = like_.device();
    if (!device.is_cuda()) return false;
    const Backend backend = backend_of(device);
    const DeviceInfo& info = GpuDriver::get(backend).device(std::max<int>(device.index(), 0));
    const Scalar scalar = scalar_of(like_.scalar_type());
    if (!program_->family().compile_arch(*program_, backend, scalar, direction, info.arch)) return false;
    // As many warps as there are rows for, or as the device holds, so that each copies weights once.
    const int64_t rows = program_->number("warp_rows");
    const int64_t most = info.multiprocessors * program_->number(std::string("most_warps/") + name(direction));
    ops_.num_edges = std::min((ops_.num_receivers + rows - 1) / rows, most) * info.warp_size;
    return true;
  }
};

Tensor run_forward(const Tensor& payload, int64_t key, const Tensor& x, const Tensor& w, c10::IntArrayRef widths,
                   Numbers factors, Numbers scales) {
  NetworkCall call("eqaccel::radial_network", payload, key, x, w);
  if (!call.prepare(Direction::forward))
    return Composed({payload, key, widths.vec(), factors.vec(), scales.vec()}, x, w).z;
  const Tensor z = call.new_rows("z_dim");
  call.operands().z = z.mutable_data_ptr();
  call.launch(Direction::forward);
  return z;
}
Tensor run_backward(const Tensor& payload, int64_t key, const Tensor& gz, const Tensor& x, const Tensor& w,
                    c10::IntArrayRef widths, Numbers factors, Numbers scales) {
  NetworkCall call("eqaccel::radial_network_backward", payload, key, x, w);
  call.operands().gz = call.rows("gz", gz, "z_dim");
  if (!call.prepare(Direction::backward))
    return Composed({payload, key, widths.vec(), factors.vec(), scales.vec()}, x, w).gradient(gz);
  const Tensor gx = call.new_rows("x_dim");
  call.operands().gx = gx.mutable_data_ptr();
  call.launch(Direction::backward);
  return gx;
}

struct NetworkOperator : KeptProblem<Problem> {
  static constexpr auto compute = call_forward;

  static variable_list backward(AutogradContext* context, const variable_list& incoming) {
    variable_list results(2);
    if (!incoming[0].defined()) return results;
    variable_list v;
    const Problem p = restore(context, v);
    if (context->needs_input_grad(1)) {
      variable_list of_weights;
      results[0] = Composed(p, v[0], v[1]).gradient(incoming[0], &of_weights);
      results[1] = at::cat(of_weights);
    } else if (context->needs_input_grad(0)) {
      results[0] = call_backward(p, incoming[0], v[0], v[1]);
    }
    return results;
  }
  static variable_list tangents(const Problem& p, const variable_list& v, const variable_list& along) {
    return {Composed(p, v[0], v[1]).tangent(along[0], along[1])};
  }
};

Tensor forward(const Tensor& payload, int64_t key, const Tensor& x, const Tensor& w, c10::IntArrayRef widths,
               Numbers factors, Numbers scales) {
  return differentiate<NetworkOperator>(Problem{payload, key, widths.vec(), factors.vec(), scales.vec()}, x, w);
}
Tensor backward(const Tensor& payload, int64_t key, const Tensor& gz, const Tensor& x, const Tensor& w,
                c10::IntArrayRef widths, Numbers factors, Numbers scales) {
  const Problem p{payload, key, widths.vec(), factors.vec(), scales.vec()};
  if (records_gradient(gz, x, w) || has_tangent(gz, x, w)) return Composed(p, x, w).gradient(gz);
  const at::AutoDispatchBelowADInplaceOrView below;
  return call_backward(p, gz, x, w);
}

// Shapes without data, for fake tensors.
Tensor forward_shape(const Tensor&, int64_t, const Tensor& x, const Tensor&, c10::IntArrayRef widths, Numbers,
                     Numbers) {
  return stand_in({x.sym_size(0), c10::SymInt(widths.back())}, x);
}
Tensor backward_shape(const Tensor&, int64_t, const Tensor&, const Tensor& x, const Tensor&, c10::IntArrayRef, Numbers,
                      Numbers) {
  return stand_in(x);
}

// Under autocast in float32, as tensor products.
Tensor forward_autocast(const Tensor& payload, int64_t key, const Tensor& x, const Tensor& w, c10::IntArrayRef widths,
                        Numbers factors, Numbers scales) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return call_forward({payload, key, widths.vec(), factors.vec(), scales.vec()}, cast_to_float32(x, x),
                      cast_to_float32(w, x));
}

void register_kernels(torch::Library& library) {
  library.impl("radial_network", run_forward);
  library.impl("radial_network_backward", run_backward);
}
TORCH_LIBRARY_IMPL(eqaccel, CPU, library) { register_kernels(library); }
TORCH_LIBRARY_IMPL(eqaccel, CUDA, library) { register_kernels(library); }
TORCH_LIBRARY_IMPL(eqaccel, Autograd, library) {
  library.impl("radial_network", forward);
  library.impl("radial_network_backward", backward);
}
TORCH_LIBRARY_IMPL(eqaccel, Meta, library) {
  library.impl("radial_network", forward_shape);
  library.impl("radial_network_backward", backward_shape);
}
TORCH_LIBRARY_IMPL(eqaccel, AutocastCPU, library) { library.impl("radial_network", forward_autocast); }
TORCH_LIBRARY_IMPL(eqaccel, AutocastCUDA, library) { library.impl("radial_network", forward_autocast); }

}  // namespace radial_network_file
}  // namespace
}  // namespace eqaccel::ops

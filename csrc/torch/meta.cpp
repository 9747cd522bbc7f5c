// Shapes without data, for fake tensors (compile, export, make_fx), and the casts of autocast.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "call.h"

namespace eqaccel::ops {
namespace {

Tensor forward(const Tensor&, int64_t, const Tensor& x, const Tensor&, const Tensor&, const Tensor&,
               c10::SymInt receivers, int64_t z_dim, bool, bool) {
  return at::empty_symint({receivers, z_dim}, x.options());
}

Gradients backward(const Tensor&, int64_t, const Tensor&, const Tensor& x, const Tensor& y, const Tensor& w,
                   const Tensor&, c10::SymInt, int64_t, bool, bool) {
  return {contiguous_like(x), contiguous_like(y), contiguous_like(w)};
}

SecondGradients double_backward(const Tensor&, int64_t, const Tensor& gz, const Tensor& x, const Tensor& y,
                                const Tensor& w, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                c10::SymInt, int64_t, bool, bool) {
  return {contiguous_like(gz), contiguous_like(x), contiguous_like(y), contiguous_like(w)};
}

TORCH_LIBRARY_IMPL(eqaccel, Meta, library) {
  library.impl("tensor_product", forward);
  library.impl("tensor_product_backward", backward);
  library.impl("tensor_product_double_backward", double_backward);
}

// Under autocast the product runs in float32: sums over many edges do not fit 16-bit types. float64 stays float64.
Tensor forward_autocast(const Tensor& payload, int64_t key, const Tensor& x, const Tensor& y, const Tensor& w,
                        const Tensor& graph, c10::SymInt receivers, int64_t z_dim, bool mul_ir, bool atomic) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto cast = [&](const Tensor& t) { return at::autocast::cached_cast(at::kFloat, t, x.device().type()); };
  return tensor_product({payload, key, graph, std::move(receivers), z_dim, mul_ir, atomic}, cast(x), cast(y),
                        cast(w));
}

TORCH_LIBRARY_IMPL(eqaccel, AutocastCPU, library) { library.impl("tensor_product", forward_autocast); }
TORCH_LIBRARY_IMPL(eqaccel, AutocastCUDA, library) { library.impl("tensor_product", forward_autocast); }

}  // namespace
}  // namespace eqaccel::ops

// eqaccel::matrix_product: a b, as torch's product but for float32 on GPUs of compute capability 9.0, which have a kernel
// that is faster, with errors of the same size. Where torch may use TensorFloat-32, or the kernel does not take the operands
// (runtime/matrix_product.h), it is torch's product there too. The derivative with respect to `a` is another call of the
// operator, that with respect to `b` a product of torch.
#include "matrix_product.h"

#include <ATen/Context.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "call.h"

namespace eqaccel::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

Tensor call(const Tensor& payload, int64_t key, const Tensor& a, const Tensor& b) {
  using Signature = Tensor(const Tensor&, int64_t, const Tensor&, const Tensor&);
  static const auto op = find_operator<Signature>("eqaccel::matrix_product");
  return op.call(payload, key, a, b);
}

bool has_kernel(const Tensor& a, const Tensor& b) {
  if (a.scalar_type() != at::kFloat || b.scalar_type() != at::kFloat || a.dim() != 2 || b.dim() != 2 ||
      a.device() != b.device() || a.size(1) != b.size(0) || at::globalContext().allowTF32CuBLAS())
    return false;
  const Backend backend = backend_of(a.device());
  return backend == Backend::cuda && GpuDriver::get(backend).arch(a.device().index()) == MatrixProduct::device_arch;
}

Tensor on_gpu(const Tensor& payload, int64_t key, const Tensor& a, const Tensor& b) {
  if (!has_kernel(a, b)) return at::mm(a, b);
  const c10::DeviceGuard guard(a.device());
  const Tensor rows = a.contiguous(), c = at::empty({a.size(0), b.size(1)}, a.options());
  const Matrices matrices{rows.const_data_ptr<float>(), b.const_data_ptr<float>(), c.mutable_data_ptr<float>(),
                          a.size(0), b.size(1), a.size(1), b.stride(0), b.stride(1)};
  if (!MatrixProduct::takes(matrices)) return at::mm(a, b);
  try {
    const auto program = program_of("eqaccel::matrix_product", payload, key);
    const MatrixProduct& kernel = MatrixProduct::get(*program, a.device().index());
    const Tensor workspace = at::empty({static_cast<int64_t>(kernel.workspace_bytes(matrices))}, a.options().dtype(at::kByte));
    kernel.launch(matrices, workspace.mutable_data_ptr(), current_stream(a.device()));
  } catch (const CompileError& error) {
    rethrow(error);
  }
  return c;
}

// torch's product, into memory that earlier results have given back: fresh memory would take as long to map as the
// weights of edges take to multiply.
Tensor on_cpu(const Tensor&, int64_t, const Tensor& a, const Tensor& b) {
  if (a.dim() != 2 || b.dim() != 2 || a.size(1) != b.size(0) || a.scalar_type() != b.scalar_type()) return at::mm(a, b);
  Tensor c = empty_kept({a.size(0), b.size(1)}, a.options());
  at::mm_out(c, a, b);
  return c;
}

Tensor elsewhere(const Tensor&, int64_t, const Tensor& a, const Tensor& b) { return at::mm(a, b); }

struct MatrixProductFunction : Function<MatrixProductFunction> {
  static Tensor forward(AutogradContext* context, const Tensor& a, const Tensor& b, const Tensor& payload, int64_t key) {
    const at::AutoDispatchBelowADInplaceOrView below;
    context->save_for_backward({a, b, payload});
    context->saved_data["key"] = key;
    return call(payload, key, a, b);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const Tensor &a = saved[0], &b = saved[1], &payload = saved[2], &g = gradients[0];
    Tensor of_a, of_b;
    if (context->needs_input_grad(0)) of_a = call(payload, context->saved_data["key"].toInt(), g, b.t());
    if (context->needs_input_grad(1)) of_b = at::mm(a.t(), g);
    return {of_a, of_b, Tensor(), Tensor()};
  }
};

Tensor differentiable(const Tensor& payload, int64_t key, const Tensor& a, const Tensor& b) {
  if (records_gradient(a, b)) return MatrixProductFunction::apply(a, b, payload, key);
  const at::AutoDispatchBelowADInplaceOrView below;
  return call(payload, key, a, b);
}

TORCH_LIBRARY_IMPL(eqaccel, Autograd, library) { library.impl("matrix_product", differentiable); }
TORCH_LIBRARY_IMPL(eqaccel, CUDA, library) { library.impl("matrix_product", on_gpu); }
TORCH_LIBRARY_IMPL(eqaccel, CPU, library) { library.impl("matrix_product", on_cpu); }
TORCH_LIBRARY_IMPL(eqaccel, Meta, library) { library.impl("matrix_product", elsewhere); }
// torch's own product knows what autocast makes of its operands.
TORCH_LIBRARY_IMPL(eqaccel, AutocastCPU, library) { library.impl("matrix_product", elsewhere); }
TORCH_LIBRARY_IMPL(eqaccel, AutocastCUDA, library) { library.impl("matrix_product", elsewhere); }

}  // namespace
}  // namespace eqaccel::ops

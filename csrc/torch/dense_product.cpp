// eqaccel::dense_product: matrix products beside tensor products. torch's own, under autocast, round to 16 bits what the
// kernels around them compute in float32, and their derivatives do.
#include <torch/library.h>

#include "differentiate.h"
#include "operators.h"

namespace eqaccel::ops {
namespace {
namespace dense_product_file {

struct NoProblem {};

Tensor call(const NoProblem&, const Tensor& a, const Tensor& b) {
  using Signature = Tensor(const Tensor&, const Tensor&);
  static const auto op = find_operator<Signature>("eqaccel::dense_product");
  return op.call(a, b);
}

void check(const Tensor& a, const Tensor& b) {
  constexpr const char* op = "eqaccel::dense_product";
  for (const auto& [name, matrix] : {std::pair("a", &a), std::pair("b", &b)})
    TORCH_CHECK(matrix->dim() == 2, op, ": argument '", name, "' must be a matrix, got shape ", matrix->sym_sizes(),
                ". Flatten leading dimensions with .flatten(0, -2).");
  TORCH_CHECK(a.sym_size(1) == b.sym_size(0) && a.scalar_type() == b.scalar_type() && a.device() == b.device(), op,
              ": argument 'b' must be ", a.scalar_type(), " of shape (", a.sym_size(1), ", columns) on ", a.device(),
              ", got ", b.scalar_type(), " of shape ", b.sym_sizes(), " on ", b.device(),
              ". Check the columns of 'a'.");
}

Tensor compute(const Tensor& a, const Tensor& b) {
  check(a, b);
  return a.mm(b);
}

Tensor shape(const Tensor& a, const Tensor& b) {
  check(a, b);
  return stand_in({a.sym_size(0), b.sym_size(1)}, a);
}

Tensor under_autocast(const Tensor& a, const Tensor& b) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return call({}, cast_to_float32(a, a), cast_to_float32(b, a));
}

struct Form {
  static constexpr auto compute = call;

  static void save(AutogradContext& context, const NoProblem&, const variable_list& operands) {
    const Tensor &a = operands[0], &b = operands[1];
    context.save_for_backward({b.requires_grad() ? a : Tensor(), a.requires_grad() ? b : Tensor()});
  }

  static variable_list backward(AutogradContext* context, const variable_list& incoming) {
    const variable_list saved = context->get_saved_variables();
    variable_list gradients(2);
    if (context->needs_input_grad(0)) gradients[0] = call({}, incoming[0], saved[1].t());
    if (context->needs_input_grad(1)) gradients[1] = call({}, saved[0].t(), incoming[0]);
    return gradients;
  }

  static variable_list tangents(const NoProblem&, const variable_list& operands, const variable_list& along) {
    variable_list sum(1);
    if (along[0].defined()) add(sum[0], call({}, along[0], operands[1]));
    if (along[1].defined()) add(sum[0], call({}, operands[0], along[1]));
    return sum;
  }
};

Tensor differentiable(const Tensor& a, const Tensor& b) { return differentiate<Form>(NoProblem{}, a, b); }

TORCH_LIBRARY_IMPL(eqaccel, CPU, library) { library.impl("dense_product", compute); }
TORCH_LIBRARY_IMPL(eqaccel, CUDA, library) { library.impl("dense_product", compute); }
TORCH_LIBRARY_IMPL(eqaccel, Meta, library) { library.impl("dense_product", shape); }
TORCH_LIBRARY_IMPL(eqaccel, Autograd, library) { library.impl("dense_product", differentiable); }
TORCH_LIBRARY_IMPL(eqaccel, AutocastCPU, library) { library.impl("dense_product", under_autocast); }
TORCH_LIBRARY_IMPL(eqaccel, AutocastCUDA, library) { library.impl("dense_product", under_autocast); }

}  // namespace dense_product_file
}  // namespace
}  // namespace eqaccel::ops

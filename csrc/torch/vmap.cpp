// The operators under torch.vmap: one call for each sample, whose results are stacked. torch does the same for
// operators without a rule, with a warning that there is none; here the loop is the rule, because each call fills the
// device.
#include <ATen/ATen.h>
#include <ATen/functorch/BatchedTensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

namespace eqaccel::ops {
namespace {

using at::Tensor;
using at::functorch::BatchedTensorImpl;
using at::functorch::makeBatched;
using at::functorch::maybeGetBatchedImpl;

const BatchedTensorImpl* batched(const c10::IValue& argument) {
  return argument.isTensor() ? maybeGetBatchedImpl(argument.toTensor()) : nullptr;
}

// Calls `op` for each sample of the innermost torch.vmap that its arguments belong to; those around it are met below.
void each_sample(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard below(c10::DispatchKey::FuncTorchBatched);
  const torch::jit::Stack arguments = torch::jit::pop(*stack, op.schema().arguments().size());
  int64_t level = -1;
  for (const c10::IValue& argument : arguments)
    if (const auto* tensor = batched(argument)) level = std::max(level, tensor->level());

  std::vector<std::pair<std::size_t, Tensor>> samples;  // of which argument, with samples in front
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const auto* tensor = batched(arguments[i]);
    if (tensor != nullptr && tensor->level() == level)
      samples.emplace_back(i, tensor->value().movedim(tensor->bdim(), 0));
  }
  TORCH_INTERNAL_ASSERT(!samples.empty());
  const int64_t count = samples.front().second.size(0);
  TORCH_CHECK(count > 0, op.schema().name(),
              ": expected a dimension of torch.vmap with one sample or more, got none. "
              "Leave out the call.");

  std::vector<std::vector<Tensor>> results(op.schema().returns().size());
  for (int64_t sample = 0; sample < count; ++sample) {
    torch::jit::Stack call = arguments;
    for (const auto& [i, values] : samples) call[i] = values.select(0, sample);
    op.callBoxed(&call);
    for (std::size_t i = 0; i < results.size(); ++i) results[i].push_back(call[i].toTensor());
  }
  for (const auto& result : results) stack->push_back(makeBatched(at::stack(result), 0, level));
}

TORCH_LIBRARY_IMPL(eqaccel, FuncTorchBatched, library) {
  for (const char* op : {"graph",
                         "tensor_product",
                         "tensor_product_backward",
                         "tensor_product_double_backward",
                         "tensor_product_triple_backward",
                         "matrix_product",
                         "polynomial",
                         "polynomial_backward",
                         "polynomial_double_backward",
                         "polynomial_polar_form",
                         "radial_basis",
                         "radial_basis_backward",
                         "radial_basis_double_backward",
                         "silu",
                         "silu_backward",
                         "silu_double_backward",
                         "radial_layer",
                         "radial_layer_backward",
                         "radial_network",
                         "radial_network_backward",
                         "gate",
                         "gate_backward",
                         "gate_double_backward",
                         "linear",
                         "permute_columns",
                         "dense_product",
                         "unit_vectors",
                         "unit_vectors_backward",
                         "exchange",
                         "exchange_backward"})
    library.impl(op, torch::CppFunction::makeFromBoxedFunction<&each_sample>());
}

}  // namespace
}  // namespace eqaccel::ops

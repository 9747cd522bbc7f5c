// The operators under torch.vmap: one call for each sample, whose results are stacked. torch does the same for operators
// without a rule, with a warning that there is none; here the loop is the rule, because each call fills the device.
#include <ATen/ATen.h>
#include <ATen/functorch/DynamicLayer.h>
#include <ATen/functorch/PlumbingHelper.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

namespace eqaccel::ops {
namespace {

using at::Tensor;

void each_sample(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard below(c10::DispatchKey::FuncTorchBatched);
  const auto layer = at::functorch::maybeCurrentDynamicLayer();
  TORCH_INTERNAL_ASSERT(layer.has_value());
  const int64_t level = layer->layerId();
  const int64_t samples = layer->batchSize().expect_int();
  const auto& schema = op.schema();
  TORCH_CHECK(samples > 0, schema.name(), ": expected a dimension of torch.vmap with one sample or more, got none. "
              "Leave out the call.");

  torch::jit::Stack arguments = torch::jit::pop(*stack, schema.arguments().size());
  std::vector<bool> batched;
  for (c10::IValue& argument : arguments) {
    batched.push_back(false);
    if (!argument.isTensor()) continue;
    auto [value, dimension] = at::functorch::unwrapTensorAtLevel(argument.toTensor(), level);
    batched.back() = dimension.has_value();
    argument = dimension ? value.movedim(*dimension, 0) : value;
  }

  if (std::find(batched.begin(), batched.end(), true) == batched.end()) {  // batched by another torch.vmap around it
    op.callBoxed(&arguments);
    stack->insert(stack->end(), arguments.begin(), arguments.end());
    return;
  }

  std::vector<std::vector<Tensor>> results(schema.returns().size());
  for (int64_t sample = 0; sample < samples; ++sample) {
    torch::jit::Stack call = arguments;
    for (std::size_t i = 0; i < call.size(); ++i)
      if (batched[i]) call[i] = call[i].toTensor().select(0, sample);
    op.callBoxed(&call);
    for (std::size_t i = 0; i < results.size(); ++i) results[i].push_back(call[i].toTensor());
  }
  for (const auto& result : results) stack->push_back(at::functorch::makeBatched(at::stack(result), 0, level));
}

TORCH_LIBRARY_IMPL(eqaccel, FuncTorchBatched, library) {
  for (const char* op : {"graph", "tensor_product", "tensor_product_backward", "tensor_product_double_backward",
                         "matrix_product", "polynomial", "polynomial_backward", "polynomial_double_backward",
                         "polynomial_polar_form", "exchange", "exchange_backward"})
    library.impl(op, torch::CppFunction::makeFromBoxedFunction<&each_sample>());
}

}  // namespace
}  // namespace eqaccel::ops

// How operators are differentiated: recorded for reverse mode, and their tangents computed for forward mode. An
// operator says what it computes and what its derivatives are; the rest stands here once, as torch's own operators do
// it, so that torch.func and forward-mode derivatives find what they expect.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <tuple>
#include <type_traits>

namespace eqaccel::ops {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Without a gradient to record, a call goes straight to the backend.
template <class... Tensors>
bool records_gradient(const Tensors&... operands) {
  return at::GradMode::is_enabled() && (operands.requires_grad() || ...);
}

constexpr int64_t tangent_level = 0;  // the only one: torch.func nests by wrapping tensors

template <class... Tensors>
bool has_tangent(const Tensors&... operands) {
  return (operands._fw_grad(tangent_level).defined() || ...);
}

// One tensor, or several.
template <class Results>
variable_list listed(const Results& results) {
  if constexpr (std::is_same_v<Results, at::Tensor>) return {results};
  else return std::apply([](const auto&... tensors) { return variable_list{tensors...}; }, results);
}

inline at::Tensor primal(const at::Tensor& t) { return has_tangent(t) ? t._fw_primal(tangent_level) : t; }

inline at::Tensor or_zeros(const at::Tensor& t, const at::Tensor& like) {
  return t.defined() ? t : at::zeros_like(like, at::MemoryFormat::Contiguous);
}

inline bool any_defined(at::ArrayRef<at::Tensor> tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor& t) { return t.defined(); });
}

// Adds to a sum that is undefined as long as it is zero.
inline void add(at::Tensor& sum, const at::Tensor& term) {
  if (term.defined()) sum = sum.defined() ? sum + term : term;
}
inline void add(variable_list& sums, const variable_list& terms) {
  for (std::size_t i = 0; i < sums.size(); ++i) add(sums[i], terms[i]);
}

// A node of the autograd graph; torch 2.13 counts references to it inside of it, earlier versions outside.
template <class Operator>
auto new_node() {
  using torch::autograd::CppNode;
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, torch::autograd::Node>)
    return c10::make_intrusive<CppNode<Operator>>();
  else return std::shared_ptr<CppNode<Operator>>(new CppNode<Operator>, [](auto* node) { deleteNode(node); });
}

template <class Operator, class Problem, class... Tensors>
auto below_autograd(const Problem& problem, const Tensors&... operands) {
  const at::AutoDispatchBelowADInplaceOrView below;
  return Operator::compute(problem, operands...);
}

// The results of an operator, with a node that knows Operator::backward. torch::autograd::Function::apply does the same
// but refuses torch.func, because a function in C++ may call anything; an operator only calls itself, below autograd.
template <class Operator, class Problem, class... Tensors>
auto record(const Problem& problem, const Tensors&... operands) {
  const auto node = new_node<Operator>();
  node->is_variable_input_.assign(sizeof...(operands), true);
  (node->input_info_.emplace_back(operands), ...);
  node->set_ctx_grad_fn(node);
  node->set_next_edges(torch::autograd::collect_next_edges(operands...));
  node->clear_input_metadata();
  const auto results = below_autograd<Operator>(problem, operands...);
  for (const at::Tensor& result : listed(results)) {
    torch::autograd::set_history(result, node);
    node->output_info_.emplace_back(result);
  }
  Operator::save(node->ctx_, problem, {operands...});
  node->save_variables_to_ctx();
  return results;
}

// The results of an operator on tensors that may need gradients and may have tangents. `Operator` has
//   compute(problem, operands...): the results, one tensor or a tuple, by a call through the dispatcher;
//   save(context, problem, operands): what backward needs;
//   backward(context, gradients): of the operands, from those of the results, any of which may be undefined;
//   tangents(problem, operands, tangents): of the results, from those of the operands, any of which may be undefined.
//   is_traceable: whether compiled autograd may trace backward.
// Backward and tangents call differentiable operators, so there are derivatives of any order in any order of modes.
template <class Operator, class Problem, class... Tensors>
auto differentiate(const Problem& problem, const Tensors&... operands) {
  const auto results = records_gradient(operands...) ? record<Operator>(problem, operands...)
                                                     : below_autograd<Operator>(problem, operands...);
  if (has_tangent(operands...)) {
    const variable_list values = listed(results);
    const variable_list tangents =
        Operator::tangents(problem, {primal(operands)...}, {operands._fw_grad(tangent_level)...});
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (tangents[i].defined()) values[i]._set_fw_grad(tangents[i], tangent_level, /*is_inplace_op=*/false);
    }
  }
  return results;
}

}  // namespace eqaccel::ops

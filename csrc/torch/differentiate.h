// How operators are differentiated: recorded for reverse mode, and their tangents computed for forward mode. An
// operator says what it computes and what its derivatives are; the rest stands here once, as torch's own operators do
// it, so that torch.func and forward-mode derivatives find what they expect.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <tuple>
#include <type_traits>
#include <typeinfo>

#include "recording.h"

namespace eqaccel::ops {

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

template <class Operator, class Problem, class... Tensors>
auto below_autograd(const Problem& problem, const Tensors&... operands) {
  const at::AutoDispatchBelowADInplaceOrView below;
  return Operator::compute(problem, operands...);
}

// The results of an operator, with a node that knows Operator::backward. torch::autograd::Function::apply does the same
// but refuses torch.func, because a function in C++ may call anything; an operator only calls itself, below autograd.
template <class Operator, class Problem, class... Tensors>
auto record(const Problem& problem, const Tensors&... operands) {
  const Recording recording(Operator::backward, typeid(Operator), {operands...});
  const auto results = below_autograd<Operator>(problem, operands...);
  recording.give(listed(results));
  Operator::save(recording.context(), problem, {operands...});
  recording.finish();
  return results;
}

// The results of an operator on tensors that may need gradients and may have tangents. `Operator` has
//   compute(problem, operands...): the results, one tensor or a tuple, by a call through the dispatcher;
//   save(context, problem, operands): what backward needs;
//   backward(context, gradients): of the operands, from those of the results, any of which may be undefined;
//   tangents(problem, operands, tangents): of the results, from those of the operands, any of which may be undefined.
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

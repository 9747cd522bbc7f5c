// What an operator keeps of a call for its derivatives: the operands, and its problem, which is a payload and some values.
#pragma once
#include <type_traits>
#include <utility>

#include "recording.h"

namespace eqaccel::ops {

// The values of a problem: Problem::each(problem, run) calls run(name, value) for every one of them.
template <class Problem>
void keep_values(AutogradContext& context, const Problem& p) {
  Problem::each(p, [&](const char* name, const auto& value) { context.saved_data[name] = value; });
}
template <class Problem>
Problem kept_values(const AutogradContext& context) {
  Problem p{};
  Problem::each(p, [&](const char* name, auto& value) {
    value = context.saved_data.at(name).template to<std::remove_reference_t<decltype(value)>>();
  });
  return p;
}

// Beside its values, `Problem` has a tensor `payload` alone.
template <class Problem>
struct KeptProblem {
  static void save(AutogradContext& context, const Problem& p, variable_list operands) {
    operands.push_back(p.payload);
    context.save_for_backward(std::move(operands));
    keep_values(context, p);
    context.set_materialize_grads(false);
  }

  // The problem, with the saved operands left in `operands`.
  static Problem restore(AutogradContext* context, variable_list& operands) {
    operands = context->get_saved_variables();
    auto p = kept_values<Problem>(*context);
    p.payload = std::move(operands.back());
    operands.pop_back();
    return p;
  }
};

}  // namespace eqaccel::ops

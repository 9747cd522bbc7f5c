// Derivatives of functions of one tensor, each row or element for itself, whose first two are a kernel each.
#pragma once
#include "differentiate.h"
#include "kept_problem.h"
#include "operators.h"

namespace eqaccel::ops {

using RowSecondGradients = std::tuple<Tensor, Tensor>;  // of <a, gx>, with respect to gz and x

// `Function` has a type `Problem`, and
//   forward(problem, x), backward(problem, gz, x), double_backward(problem, gz, x, a): calls of its operators;
//   tangent(problem, x, along): of its result, from a tangent of x;
//   composed(problem, gz, x, a): what the last of the operators gives, by torch's own.
template <class Function>
struct RowFunction {
  using Problem = typename Function::Problem;
  using Kept = KeptProblem<Problem>;

  struct Forward : Kept {
    static constexpr auto compute = Function::forward;

    static variable_list backward(AutogradContext* context, const variable_list& incoming) {
      if (!incoming[0].defined()) return variable_list(1);
      variable_list v;
      const Problem p = Kept::restore(context, v);
      return {Function::backward(p, incoming[0], v[0])};
    }
    static variable_list tangents(const Problem& p, const variable_list& v, const variable_list& along) {
      return {Function::tangent(p, v[0], along[0])};
    }
  };

  struct Backward : Kept {
    static constexpr auto compute = Function::backward;

    static variable_list backward(AutogradContext* context, const variable_list& incoming) {
      if (!incoming[0].defined()) return variable_list(2);
      variable_list v;
      const Problem p = Kept::restore(context, v);
      return listed(Function::double_backward(p, v[0], v[1], incoming[0]));
    }
    static variable_list tangents(const Problem& p, const variable_list& v, const variable_list& along) {
      variable_list sum(1);
      if (along[0].defined()) add(sum[0], Function::backward(p, along[0], v[1]));
      if (along[1].defined()) add(sum[0], std::get<1>(Function::double_backward(p, v[0], v[1], along[1])));
      return sum;
    }
  };

  // The three operators, differentiable any number of times.
  static Tensor forward(const Problem& p, const Tensor& x) { return differentiate<Forward>(p, x); }
  static Tensor backward(const Problem& p, const Tensor& gz, const Tensor& x) {
    return differentiate<Backward>(p, gz, x);
  }
  static RowSecondGradients double_backward(const Problem& p, const Tensor& gz, const Tensor& x, const Tensor& a) {
    if (records_gradient(gz, x, a) || has_tangent(gz, x, a)) return Function::composed(p, gz, x, a);
    const at::AutoDispatchBelowADInplaceOrView below;
    return Function::double_backward(p, gz, x, a);
  }
};

}  // namespace eqaccel::ops

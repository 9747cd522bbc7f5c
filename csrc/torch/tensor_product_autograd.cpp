// Derivatives of any order. F(x, y, w) is linear in x and y, and in w but for paths without weights, which do not depend
// on it. So the first derivative is the backward operator, the second the double backward operator, and the third a sum
// of the two or one kernel; all are called through the dispatcher and are differentiable themselves. In C++, because a
// scripted model in LAMMPS has no Python to find them.
//
// Tangents are found by the same operators. The gradient of a function changes along a direction by the product of its
// Hessian, which is symmetric, with the direction, and that is what backward of a gradient computes.
#include <torch/library.h>

#include <algorithm>
#include <array>

#include "differentiate.h"
#include "kept_problem.h"
#include "product_recipe.h"
#include "product_record.h"
#include "tensor_product.h"

namespace eqaccel::ops {
namespace {
namespace tensor_product_autograd_file {

// What the three operators keep for their derivatives. The weights, operand number `weights`, are the largest arrays of a
// model: where they are a large product of matrices, they are not kept but made again.
template <std::size_t weights>
struct Kept {
  static void save(AutogradContext& context, const TensorProductProblem& p, variable_list operands) {
    auto recipe = product_recipe(operands[weights]);
    if (recipe) operands[weights] = Tensor();
    operands.push_back(p.payload);
    operands.push_back(p.graph);
    if (recipe) {
      context.saved_data["operands"] = static_cast<int64_t>(operands.size());
      context.saved_data["recipe"] = c10::IValue::make_capsule(std::move(recipe->first));
      operands.insert(operands.end(), recipe->second.begin(), recipe->second.end());
    }
    context.save_for_backward(std::move(operands));
    keep_values(context, p);
    context.set_materialize_grads(false);
  }

  // The problem, with the saved operands left in `operands`.
  static TensorProductProblem restore(AutogradContext* context, variable_list& operands) {
    operands = context->get_saved_variables();
    auto& data = context->saved_data;
    if (data.find("recipe") != data.end()) {
      const auto recipe = c10::static_intrusive_pointer_cast<ProductRecipe>(data["recipe"].toCapsule());
      const auto end = operands.begin() + data["operands"].toInt();
      const variable_list made_of(end, operands.end());
      operands.erase(end, operands.end());
      // The gradients that a first derivative has by its weights are as large as these, and wait for those of the result.
      constexpr bool is_first = weights == 2;
      operands[weights] = is_first ? recipe->make_anew(made_of) : recipe->make(made_of);
    }
    auto p = kept_values<TensorProductProblem>(*context);
    p.graph = std::move(operands.back());
    operands.pop_back();
    p.payload = std::move(operands.back());
    operands.pop_back();
    return p;
  }
};

variable_list gradients(const TensorProductProblem& p, const Tensor& gz, const Tensor& x, const Tensor& y,
                        const Tensor& w) {
  return listed(tensor_product_backward(p, gz, x, y, w));
}
// a, b and c may be undefined.
variable_list second_gradients(const TensorProductProblem& p, const Tensor& gz, const Tensor& x, const Tensor& y,
                               const Tensor& w, const Tensor& a, const Tensor& b, const Tensor& c) {
  return listed(tensor_product_double_backward(p, gz, x, y, w, or_zeros(a, x), or_zeros(b, y), or_zeros(c, w)));
}

bool has_columns(const Tensor& w) { return w.sym_size(-1) != 0; }

struct Forward : Kept<2> {
  static constexpr auto compute = tensor_product;

  static variable_list backward(AutogradContext* context, const variable_list& incoming) {
    const Tensor& gz = incoming[0];
    if (!gz.defined()) return variable_list(3);
    variable_list v;
    const TensorProductProblem p = restore(context, v);
    return gradients(p, gz, v[0], v[1], v[2]);
  }

  static variable_list tangents(const TensorProductProblem& p, const variable_list& operands,
                                const variable_list& along) {
    const Tensor &x = operands[0], &y = operands[1], &w = operands[2];
    // With a tangent in the place of w paths without weights would give theirs once more.
    if (along[2].defined() && has_columns(w)) {
      const Tensor gz = at::zeros_symint({p.receivers, p.z_dim}, x.options());
      return {second_gradients(p, gz, x, y, w, along[0], along[1], along[2])[0]};
    }
    variable_list sum(1);
    if (along[0].defined()) add(sum[0], tensor_product(p, along[0], y, w));
    if (along[1].defined()) add(sum[0], tensor_product(p, x, along[1], w));
    return sum;
  }
};

struct Backward : Kept<3> {
  static constexpr auto compute = tensor_product_backward;

  static variable_list backward(AutogradContext* context, const variable_list& t) {
    if (!any_defined(t)) return variable_list(4);
    variable_list v;
    const TensorProductProblem p = restore(context, v);
    return second_gradients(p, v[0], v[1], v[2], v[3], t[0], t[1], t[2]);
  }

  static variable_list tangents(const TensorProductProblem& p, const variable_list& v, const variable_list& along) {
    variable_list sum(3);
    if (along[0].defined()) add(sum, gradients(p, along[0], v[1], v[2], v[3]));
    if (any_defined({along[1], along[2], along[3]})) {
      variable_list second = second_gradients(p, v[0], v[1], v[2], v[3], along[1], along[2], along[3]);
      second.erase(second.begin());
      add(sum, second);
    }
    return sum;
  }
};

// The gradients of <g, ggz> + <p, gx> + <q, gy> + <r, gw> with respect to the operands of the double backward operator
// for which needed(number) holds; `incoming` is g, p, q and r. With F4(gz, x, y, w) = <gz, F(x, y, w)>, and D4 the part of
// it that depends on w, this sum is
//   F4(g, a, y, w) + F4(g, x, b, w) + D4(g, x, y, c)
//   + F4(gz, p, b, w) + D4(gz, p, y, c)
//   + F4(gz, a, q, w) + D4(gz, a, y, r)
//   + D4(gz, x, q, c)
//   + D4(gz, x, b, r),
// and each line is what one call of the double backward operator differentiates, with respect to the operands in the
// places of gz, x, y and w: D4 is what it has of its last operand. Operands in other places need a call of the backward
// operator. One kernel gives all of it, and takes as long as some of the calls.
class Third {
 public:
  template <class Needed>
  Third(const TensorProductProblem& problem, const variable_list& operands, const variable_list& incoming,
        const Needed& needed)
      : problem_(problem), operands_(operands), incoming_(incoming) {
    const Tensor &gz = operands[GZ], &x = operands[X], &y = operands[Y], &w = operands[W];
    const Tensor &a = operands[A], &b = operands[B], &c = operands[C];
    const Tensor &g = incoming[0], &p = incoming[1], &q = incoming[2], &r = incoming[3], zero;
    for (int operand = 0; operand < none; ++operand) needed_[operand] = needed(operand);
    if (g.defined()) {
      add_call({none, X, Y, W}, {g, x, y, w, a, b, c});
      add_call({A, B, C, none}, {g, x, y, w});
    }
    if (p.defined()) {
      add_call({GZ, none, Y, W}, {gz, p, y, w, zero, b, c});
      add_call({none, B, C, none}, {gz, p, y, w});
    }
    if (q.defined() || r.defined()) add_call({GZ, A, Y, W}, {gz, a, y, w, zero, q, r});
    if (!has_columns(w)) return;
    if (q.defined()) {
      add_call({GZ, X, none, none}, {gz, x, q, w, zero, zero, c});
      add_call({none, none, C, none}, {gz, x, q, w});
    }
    if (r.defined()) add_call({GZ, X, B, none}, {gz, x, b, w, zero, zero, r});
  }

  // By calls of operators that are differentiable themselves.
  variable_list composed() const {
    variable_list sums(none);
    for (const Call& call : calls_) {
      const variable_list& v = call.operands;
      const variable_list results = call.is_second()
                                        ? second_gradients(problem_, v[0], v[1], v[2], v[3], v[4], v[5], v[6])
                                        : gradients(problem_, v[0], v[1], v[2], v[3]);
      for (std::size_t i = 0; i < call.of.size(); ++i)
        if (wanted(call.of[i])) add(sums[call.of[i]], results[i]);
    }
    return sums;
  }

  // In the way that takes least time.
  variable_list best() const {
    if (!takes_longer_than_kernel() || records() || !third_program_of(problem_, operands_[X])) return composed();
    const variable_list& v = operands_;
    const variable_list t{or_zeros(incoming_[0], v[GZ]), or_zeros(incoming_[1], v[X]), or_zeros(incoming_[2], v[Y]),
                          or_zeros(incoming_[3], v[W])};
    variable_list results = listed(
        tensor_product_triple_backward(problem_, v[GZ], v[X], v[Y], v[W], v[A], v[B], v[C], t[0], t[1], t[2], t[3]));
    for (int operand = 0; operand < none; ++operand)
      if (!wanted(static_cast<Operand>(operand))) results[operand] = Tensor();
    return results;
  }

 private:
  enum Operand { GZ, X, Y, W, A, B, C, none };
  // Of an operator, whose results belong to some operands: the double backward or, with four operands, the backward.
  struct Call {
    std::array<Operand, 4> of;
    variable_list operands;
    bool is_second() const { return operands.size() > 4; }
  };

  // If one of the operands that the results belong to needs a gradient.
  void add_call(std::array<Operand, 4> of, variable_list operands) {
    if (std::any_of(of.begin(), of.end(), [&](Operand operand) { return wanted(operand); }))
      calls_.push_back({of, std::move(operands)});
  }
  bool wanted(Operand operand) const { return operand != none && needed_[operand]; }

  // In fifths of the time of a double backward, measured on CPUs (docs/mathematics.md).
  bool takes_longer_than_kernel() const {
    constexpr int of_first = 2, of_second = 5, of_kernel = 13;
    int time = 0;
    for (const Call& call : calls_) time += call.is_second() ? of_second : of_first;
    return time > of_kernel;
  }
  // Whether results are differentiated once more, which the kernel's are by composition alone.
  bool records() const {
    const auto needs = [](const Tensor& t) { return t.defined() && (t.requires_grad() || has_tangent(t)); };
    return at::GradMode::is_enabled() && (std::any_of(operands_.begin(), operands_.end(), needs) ||
                                          std::any_of(incoming_.begin(), incoming_.end(), needs));
  }

  const TensorProductProblem& problem_;
  const variable_list &operands_, &incoming_;
  std::array<bool, none> needed_;
  std::vector<Call> calls_;
};

struct DoubleBackward : Kept<3> {
  static constexpr auto compute = tensor_product_double_backward;

  static variable_list backward(AutogradContext* context, const variable_list& incoming) {
    variable_list v;
    const TensorProductProblem p = restore(context, v);
    return Third(p, v, incoming, [&](int operand) { return context->needs_input_grad(operand); }).best();
  }

  static variable_list tangents(const TensorProductProblem& p, const variable_list& v, const variable_list& along) {
    variable_list sum(4);
    if (any_defined({along[4], along[5], along[6]}))
      add(sum, second_gradients(p, v[0], v[1], v[2], v[3], along[4], along[5], along[6]));
    const variable_list direction(along.begin(), along.begin() + 4);
    if (any_defined(direction)) add(sum, Third(p, v, direction, [](int operand) { return operand < 4; }).best());
    return sum;
  }
};

Tensor forward(const Tensor& payload, int64_t key, const Tensor& x, const Tensor& y, const Tensor& w,
               const Tensor& graph, c10::SymInt receivers, int64_t z_dim, bool mul_ir, bool deterministic) {
  const TensorProductProblem p{payload, key, graph, std::move(receivers), z_dim, mul_ir, deterministic};
  const Tensor z = differentiate<Forward>(p, x, y, w);
  ProductRecord::note(p, x, y, w, z);
  return z;
}

TensorProductGradients backward(const Tensor& payload, int64_t key, const Tensor& gz, const Tensor& x, const Tensor& y,
                                const Tensor& w, const Tensor& graph, c10::SymInt receivers, int64_t z_dim, bool mul_ir,
                                bool deterministic) {
  const TensorProductProblem p{payload, key, graph, std::move(receivers), z_dim, mul_ir, deterministic};
  return differentiate<Backward>(p, gz, x, y, w);
}

TensorProductSecondGradients double_backward(const Tensor& payload, int64_t key, const Tensor& gz, const Tensor& x,
                                             const Tensor& y, const Tensor& w, const Tensor& a, const Tensor& b,
                                             const Tensor& c, const Tensor& graph, c10::SymInt receivers, int64_t z_dim,
                                             bool mul_ir, bool deterministic) {
  const TensorProductProblem p{payload, key, graph, std::move(receivers), z_dim, mul_ir, deterministic};
  return differentiate<DoubleBackward>(p, gz, x, y, w, a, b, c);
}

// Where it is differentiated itself it is composed, and its derivatives with it.
TensorProductThirdGradients triple_backward(const Tensor& payload, int64_t key, const Tensor& gz, const Tensor& x,
                                            const Tensor& y, const Tensor& w, const Tensor& a, const Tensor& b,
                                            const Tensor& c, const Tensor& g, const Tensor& p, const Tensor& q,
                                            const Tensor& r, const Tensor& graph, c10::SymInt receivers, int64_t z_dim,
                                            bool mul_ir, bool deterministic) {
  const TensorProductProblem problem{payload, key, graph, std::move(receivers), z_dim, mul_ir, deterministic};
  if (records_gradient(gz, x, y, w, a, b, c, g, p, q, r) || has_tangent(gz, x, y, w, a, b, c, g, p, q, r))
    return compose_third_gradients(problem, {gz, x, y, w, a, b, c}, {g, p, q, r});
  const at::AutoDispatchBelowADInplaceOrView below;
  return tensor_product_triple_backward(problem, gz, x, y, w, a, b, c, g, p, q, r);
}

TORCH_LIBRARY_IMPL(eqaccel, Autograd, library) {
  library.impl("tensor_product", forward);
  library.impl("tensor_product_backward", backward);
  library.impl("tensor_product_double_backward", double_backward);
  library.impl("tensor_product_triple_backward", triple_backward);
}

}  // namespace tensor_product_autograd_file
}  // namespace

TensorProductThirdGradients compose_third_gradients(const TensorProductProblem& p, const variable_list& v,
                                                    const variable_list& incoming) {
  const variable_list sums = tensor_product_autograd_file::Third(p, v, incoming, [](int) { return true; }).composed();
  return {sums[0], sums[1], sums[2], sums[3], sums[4], sums[5], sums[6]};
}

}  // namespace eqaccel::ops

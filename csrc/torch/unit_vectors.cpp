// eqaccel::unit_vectors: rows divided by their lengths, as torch.nn.functional.normalize does it. The derivatives are
// closed forms, which take a third of the kernels that those of norm, bound and quotient take one by one.
#include <torch/library.h>

#include <tuple>

#include "differentiate.h"
#include "operators.h"

namespace eqaccel::ops {
namespace {

using UnitVectors = std::tuple<Tensor, Tensor, Tensor>;

constexpr double shortest = 1e-12;  // shorter rows are divided by it, and have no direction

// What derivatives need of the rows: their directions and lengths.
struct Geometry {
  Tensor direction, length;
};

UnitVectors call_forward(const Tensor& x) {
  using Signature = UnitVectors(const Tensor&);
  static const auto op = find_operator<Signature>("eqaccel::unit_vectors");
  return op.call(x);
}
Tensor call_backward(const Geometry& geometry, const Tensor& gz, const Tensor& x) {
  using Signature = Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&);
  static const auto op = find_operator<Signature>("eqaccel::unit_vectors_backward");
  return op.call(gz, x, geometry.direction, geometry.length);
}

Tensor row_products(const Tensor& a, const Tensor& b) { return at::mul(a, b).sum(-1, /*keepdim=*/true); }

UnitVectors compute_forward(const Tensor& x) {
  TORCH_CHECK(x.dim() == 2, "eqaccel::unit_vectors: argument 'x' must have shape (rows, columns), got ", x.sym_sizes(),
              ". Flatten leading dimensions with .flatten(0, -2).");
  const Tensor norm = at::linalg_vector_norm(x, 2, at::IntArrayRef{-1}, /*keepdim=*/true);
  const Tensor length = norm.clamp_min(shortest), unit = x / length;
  return {unit, at::where(norm.ge(shortest), unit, 0), length};
}

// What is left of a vector beside its part along the row, which length one does not allow to change, by the length.
Tensor across(const Geometry& g, const Tensor& vector, const Tensor& along) {
  return at::addcmul(vector, g.direction, along, -1) / g.length;
}

Tensor compute_backward(const Tensor& gz, const Tensor&, const Tensor& direction, const Tensor& length) {
  return across({direction, length}, gz, row_products(direction, gz));
}

// The gradients of <a, backward(gz, x)> with respect to gz and x.
variable_list second_gradients(const Geometry& g, const Tensor& gz, const Tensor& a) {
  const Tensor along_a = row_products(g.direction, a), along_gz = row_products(g.direction, gz);
  const Tensor of_direction = at::addcmul(row_products(a, gz), along_a, along_gz, -3);
  Tensor sum = at::addcmul(of_direction * g.direction, along_gz, a);
  sum = at::addcmul(sum, along_a, gz);
  return {across(g, a, along_a), sum / g.length.square().neg()};
}

struct Backward {
  static constexpr bool is_traceable = false;
  static constexpr auto compute = call_backward;

  static void save(AutogradContext& context, const Geometry& g, variable_list operands) {
    operands.push_back(g.direction);
    operands.push_back(g.length);
    context.save_for_backward(std::move(operands));
  }

  // Where this is differentiated itself, what follows from x has to be known to follow from it.
  static variable_list second(const Geometry& g, const Tensor& gz, const Tensor& x, const Tensor& a) {
    if (!records_gradient(gz, x, a) && !has_tangent(gz, x, a)) return second_gradients(g, gz, a);
    const Tensor norm = at::linalg_vector_norm(x, 2, at::IntArrayRef{-1}, /*keepdim=*/true);
    const Tensor length = norm.clamp_min(shortest);
    return second_gradients({at::where(norm.ge(shortest), x / length, 0), length}, gz, a);
  }

  static variable_list backward(AutogradContext* context, const variable_list& incoming) {
    const variable_list v = context->get_saved_variables();
    return second({v[2], v[3]}, v[0], v[1], incoming[0]);
  }

  static variable_list tangents(const Geometry& g, const variable_list& v, const variable_list& along) {
    variable_list sum(1);
    if (along[0].defined()) add(sum[0], call_backward(g, along[0], v[1]));
    if (along[1].defined()) add(sum[0], second(g, v[0], v[1], along[1])[1]);
    return sum;
  }
};

// The unit vectors, which are there already, as what follows from x.
struct Forward {
  static constexpr bool is_traceable = false;

  struct Problem {
    Tensor unit;
    Geometry geometry;
  };

  static Tensor compute(const Problem& p, const Tensor&) { return p.unit; }

  static void save(AutogradContext& context, const Problem& p, variable_list operands) {
    operands.push_back(p.geometry.direction);
    operands.push_back(p.geometry.length);
    context.save_for_backward(std::move(operands));
  }

  static variable_list backward(AutogradContext* context, const variable_list& incoming) {
    const variable_list v = context->get_saved_variables();
    return {call_backward({v[1], v[2]}, incoming[0], v[0])};
  }

  static variable_list tangents(const Problem& p, const variable_list& v, const variable_list& along) {
    return {call_backward(p.geometry, along[0], v[0])};  // symmetric, so that a tangent is a gradient
  }
};

UnitVectors forward(const Tensor& x) {
  const auto [unit, direction, length] = [&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    return call_forward(x);
  }();
  return {differentiate<Forward>(Forward::Problem{unit, {direction, length}}, x), direction, length};
}

Tensor backward(const Tensor& gz, const Tensor& x, const Tensor& direction, const Tensor& length) {
  return differentiate<Backward>(Geometry{direction, length}, gz, x);
}

TORCH_LIBRARY_IMPL(eqaccel, CompositeExplicitAutograd, library) {
  library.impl("unit_vectors", compute_forward);
  library.impl("unit_vectors_backward", compute_backward);
}
TORCH_LIBRARY_IMPL(eqaccel, Autograd, library) {
  library.impl("unit_vectors", forward);
  library.impl("unit_vectors_backward", backward);
}

}  // namespace
}  // namespace eqaccel::ops

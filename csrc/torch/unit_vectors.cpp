// eqaccel::unit_vectors: rows divided by their lengths, as torch.nn.functional.normalize does it, and the lengths. The
// derivatives are closed forms, which take a third of the kernels that those of norm, bound and quotient take one by one,
// and those of both results are one.
#include <torch/library.h>

#include <tuple>

#include "differentiate.h"
#include "operators.h"

namespace eqaccel::ops {
namespace {
namespace unit_vectors_file {

constexpr double shortest = 1e-12;  // shorter rows are divided by it, and have no direction

// What derivatives need of the rows: their directions, and what they were divided by.
struct Geometry {
  Tensor direction, divisor;
};

using UnitVectors = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Gradient = std::tuple<Tensor, Tensor>;

UnitVectors call_forward(const Tensor& x) {
  using Signature = UnitVectors(const Tensor&);
  static const auto op = find_operator<Signature>("eqaccel::unit_vectors");
  return op.call(x);
}
Gradient call_backward(const Geometry& geometry, const Tensor& gz, const Tensor& gl, const Tensor& x) {
  using Signature = Gradient(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&);
  static const auto op = find_operator<Signature>("eqaccel::unit_vectors_backward");
  return op.call(gz, gl, x, geometry.direction, geometry.divisor);
}

// The gradient of the lengths where there is none, and whether there is one.
Tensor none(const Tensor& like) { return at::empty({0}, like.options()); }
bool is_given(const Tensor& gl) { return gl.dim() == 2; }

Tensor row_products(const Tensor& a, const Tensor& b) { return at::mul(a, b).sum(-1, /*keepdim=*/true); }

// A mask is multiplied by: a number that at::where takes in its place is a kernel of its own on a GPU.
UnitVectors compute_forward(const Tensor& x) {
  TORCH_CHECK(x.dim() == 2, "eqaccel::unit_vectors: argument 'x' must have shape (rows, columns), got ", x.sym_sizes(),
              ". Flatten leading dimensions with .flatten(0, -2).");
  const Tensor length = at::linalg_vector_norm(x, 2, at::IntArrayRef{-1}, /*keepdim=*/true);
  const Tensor divisor = length.clamp_min(shortest), unit = x / divisor;
  return {unit, length, unit * length.ge(shortest), divisor};
}

// A vector without a part along the row.
Tensor across(const Geometry& g, const Tensor& vector, const Tensor& along) {
  return at::addcmul(vector, g.direction, along, -1) / g.divisor;
}

// A unit vector does not change along the row, but the length does.
Gradient compute_backward(const Tensor& gz, const Tensor& gl, const Tensor&, const Tensor& direction,
                          const Tensor& divisor) {
  Tensor along = row_products(direction, gz);
  if (is_given(gl)) along = at::addcmul(along, gl, divisor, -1);
  return {across({direction, divisor}, gz, along), along};
}

// The gradients of <a, gx> with respect to gz, gl and x, where gx and `along` are the results of backward.
variable_list second_gradients(const Geometry& g, const Gradient& found, const Tensor& gz, const Tensor& gl,
                               const Tensor& a) {
  const auto& [gx, along] = found;
  const Tensor products = g.direction * a, along_a = products.sum(-1, /*keepdim=*/true);
  const Tensor across_a = across(g, a, along_a);
  const Tensor of_direction = is_given(gl) ? at::addcmul(products * gl, across_a, gz, -1).sum(-1, /*keepdim=*/true)
                                           : row_products(across_a, gz).neg();
  Tensor sum = at::addcmul(of_direction * g.direction, along, across_a, -1);
  sum = at::addcmul(sum, along_a, gx, -1);
  return {across_a, is_given(gl) ? along_a : Tensor(), sum / g.divisor};
}

struct Backward {
  struct Problem {
    Geometry geometry;
    Gradient found;
  };

  // The gradient, which is there already, as what follows from the operands.
  static Tensor compute(const Problem& p, const Tensor&, const Tensor&, const Tensor&) { return std::get<0>(p.found); }

  static void save(AutogradContext& context, const Problem& p, variable_list operands) {
    const auto& [gx, along] = p.found;
    operands.insert(operands.end(), {p.geometry.direction, p.geometry.divisor, gx.detach(), along});
    context.save_for_backward(std::move(operands));
  }

  // Where this is differentiated itself, what follows from x has to be known to follow from it.
  static variable_list second(const Problem& p, const Tensor& gz, const Tensor& gl, const Tensor& x, const Tensor& a) {
    if (!records_gradient(gz, gl, x, a) && !has_tangent(gz, gl, x, a))
      return second_gradients(p.geometry, p.found, gz, gl, a);
    const auto [unit, length, direction, divisor] = compute_forward(x);
    return second_gradients({direction, divisor}, compute_backward(gz, gl, x, direction, divisor), gz, gl, a);
  }

  static variable_list backward(AutogradContext* context, const variable_list& incoming) {
    const variable_list v = context->get_saved_variables();
    return second({{v[3], v[4]}, {v[5], v[6]}}, v[0], v[1], v[2], incoming[0]);
  }

  static variable_list tangents(const Problem& p, const variable_list& v, const variable_list& along) {
    variable_list sum(1);
    if (any_defined({along[0], along[1]})) {
      const Tensor gl = along[1].defined() ? along[1] : none(v[1]);
      add(sum[0], std::get<0>(call_backward(p.geometry, or_zeros(along[0], v[0]), gl, v[2])));
    }
    if (along[2].defined()) add(sum[0], second(p, v[0], v[1], v[2], along[2])[2]);
    return sum;
  }
};

// Unit vectors and lengths, which are there already, as what follows from x.
struct Forward {
  struct Problem {
    Tensor unit, length;
    Geometry geometry;
  };

  static std::tuple<Tensor, Tensor> compute(const Problem& p, const Tensor&) { return {p.unit, p.length}; }

  static void save(AutogradContext& context, const Problem& p, variable_list operands) {
    operands.insert(operands.end(), {p.geometry.direction, p.geometry.divisor});
    context.save_for_backward(std::move(operands));
    context.set_materialize_grads(false);
  }

  static variable_list backward(AutogradContext* context, const variable_list& incoming) {
    if (!any_defined(incoming)) return variable_list(1);
    const variable_list v = context->get_saved_variables();
    const Tensor gz = or_zeros(incoming[0], v[0]), gl = incoming[1].defined() ? incoming[1] : none(v[0]);
    return {std::get<0>(call_backward({v[1], v[2]}, gz, gl, v[0]))};
  }

  // The derivative of the unit vectors is symmetric, so that a tangent is a gradient.
  static variable_list tangents(const Problem& p, const variable_list& v, const variable_list& along) {
    return {std::get<0>(call_backward(p.geometry, along[0], none(v[0]), v[0])),
            row_products(std::get<0>(call_forward(v[0])), along[0])};
  }
};

UnitVectors forward(const Tensor& x) {
  const auto [unit, length, direction, divisor] = [&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    return call_forward(x);
  }();
  const auto [z, l] = differentiate<Forward>(Forward::Problem{unit, length, {direction, divisor}}, x);
  return {z, l, direction, divisor};
}

Gradient backward(const Tensor& gz, const Tensor& gl, const Tensor& x, const Tensor& direction, const Tensor& divisor) {
  const Geometry geometry{direction, divisor};
  const Gradient found = [&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    return call_backward(geometry, gz, gl, x);
  }();
  return {differentiate<Backward>(Backward::Problem{geometry, found}, gz, gl, x), std::get<1>(found)};
}

TORCH_LIBRARY_IMPL(eqaccel, CompositeExplicitAutograd, library) {
  library.impl("unit_vectors", compute_forward);
  library.impl("unit_vectors_backward", compute_backward);
}
TORCH_LIBRARY_IMPL(eqaccel, Autograd, library) {
  library.impl("unit_vectors", forward);
  library.impl("unit_vectors_backward", backward);
}

}  // namespace unit_vectors_file
}  // namespace
}  // namespace eqaccel::ops

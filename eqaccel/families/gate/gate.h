// Parts of a gate, and what an activation and its channel come to in each direction.
#pragma once
#include "activations.h"

namespace {

// `count` activations from number `first` of a row on. They read scalars from column `gate` on, and write from column
// `output` on.
template <class Activation_, int first_, int count_, int gate_, int output_>
struct Scalars {
  typedef Activation_ Activation;
  static constexpr int first = first_, count = count_, gate = gate_, output = output_;
  static constexpr bool gated = false;
};
// The same of gates, which multiply the `dim` components of a channel each, from column `channel` on.
template <class Activation_, int first_, int count_, int gate_, int output_, int channel_, int dim_>
struct Gated : Scalars<Activation_, first_, count_, gate_, output_> {
  static constexpr int channel = channel_, dim = dim_;
  static constexpr bool gated = true;
};

// `Place` reads and writes elements of rows for some activations: column `c` of the first one, `step` more of each next.
template <class P, class Part, class Place>
EQ_FN void run_scalars(const eq_operands& o, const Place& at) {
  const T factor = T(Part::Activation::factor);
  const Curve f = Part::Activation::of(at.read(o.x, P::x_dim, Part::gate, 1));
  if constexpr (!has_gradient) {
    at.write(o.z, P::z_dim, Part::output, 1, factor * f.value);
  } else {
    const V gz = at.read(o.gz, P::z_dim, Part::output, 1);
    if constexpr (!has_tangents) {
      at.write(o.gx, P::x_dim, Part::gate, 1, gz * (factor * f.slope));
    } else {
      const V a = at.read(o.a, P::x_dim, Part::gate, 1);
      at.write(o.z, P::z_dim, Part::output, 1, a * (factor * f.slope));
      at.write(o.gx, P::x_dim, Part::gate, 1, a * gz * (factor * f.curvature));
    }
  }
}
template <class P, class Part, class Place>
EQ_FN void run_gated(const eq_operands& o, const Place& at) {
  const T factor = T(Part::Activation::factor);
  const Curve f = Part::Activation::of(at.read(o.x, P::x_dim, Part::gate, 1));
  const V value = factor * f.value, slope = factor * f.slope;
  V a{}, sum{}, along{};  // of the gate: its tangent, <gz, x> and <a, gz>
  if (has_tangents) a = at.read(o.a, P::x_dim, Part::gate, 1);
#pragma unroll
  for (int i = 0; i < Part::dim; ++i) {
    const V x = at.read(o.x, P::x_dim, Part::channel + i, Part::dim);
    if constexpr (!has_gradient) {
      at.write(o.z, P::z_dim, Part::output + i, Part::dim, value * x);
    } else {
      const V gz = at.read(o.gz, P::z_dim, Part::output + i, Part::dim);
      sum = sum + gz * x;
      if constexpr (!has_tangents) {
        at.write(o.gx, P::x_dim, Part::channel + i, Part::dim, gz * value);
      } else {
        const V of_x = at.read(o.a, P::x_dim, Part::channel + i, Part::dim);
        along = along + of_x * gz;
        at.write(o.z, P::z_dim, Part::output + i, Part::dim, of_x * value + a * slope * x);
        at.write(o.gx, P::x_dim, Part::channel + i, Part::dim, a * slope * gz);
      }
    }
  }
  if constexpr (has_tangents) at.write(o.gx, P::x_dim, Part::gate, 1, along * slope + a * sum * (factor * f.curvature));
  else if constexpr (has_gradient) at.write(o.gx, P::x_dim, Part::gate, 1, sum * slope);
}
template <class P, class Part, class Place>
EQ_FN void run_part(const eq_operands& o, const Place& at) {
  if constexpr (Part::gated) run_gated<P, Part>(o, at);
  else run_scalars<P, Part>(o, at);
}

}  // namespace

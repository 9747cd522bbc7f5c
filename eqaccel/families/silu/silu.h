// SiLU with factors, and its derivatives.
#pragma once

#include "activations.h"

namespace {

// An element of each operand that a direction has, to those of its results.
template <class P>
EQ_FN void run_element(V x, V gz, V a, V& z, V& gx) {
  const Curve f = silu_curve(T(P::scale) * x);
  const T factor = T(P::factor), first = T(P::factor * P::scale), second = T(P::factor * P::scale * P::scale);
  if constexpr (!has_gradient) {
    z = factor * f.value;
  } else if constexpr (!has_tangents) {
    gx = gz * (first * f.slope);
  } else {
    z = a * (first * f.slope);
    gx = a * gz * (second * f.curvature);
  }
}

}  // namespace

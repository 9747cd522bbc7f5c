// SiLU, x / (1 + exp(-x)), and its derivatives.
#pragma once

namespace {

struct Silu {
  V value, slope, curvature;
};
EQ_FN Silu silu(V x) {
  const auto positive = x >= T(0);
  const V e = decay(positive ? x : -x);
  // The logistic function of x and of -x, none by a subtraction from the other.
  const V large = T(1) / (T(1) + e), small = e * large;
  const V s = positive ? large : small, rest = positive ? small : large;
  return {x * s, s * (T(1) + x * rest), s * rest * (T(2) + x * (rest - s))};
}

// An element of each operand that a direction has, to those of its results.
template <class P>
EQ_FN void run_element(V x, V gz, V a, V& z, V& gx) {
  const Silu f = silu(T(P::scale) * x);
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

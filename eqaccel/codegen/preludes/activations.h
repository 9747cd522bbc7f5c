// Activations with their first two derivatives, of `V` (elementary.h).
#pragma once

namespace {

struct Curve {
  V value, slope, curvature;
};

// The logistic functions of x and of -x, none by a subtraction from the other.
struct Logistic {
  V of, rest, decayed;  // and exp(-|x|)
};
EQ_FN Logistic logistic(V x) {
  const auto positive = x >= T(0);
  const V e = decay(positive ? x : -x);
  const V large = inverse(T(1) + e), small = e * large;
  return {positive ? large : small, positive ? small : large, e};
}

EQ_FN Curve silu_curve(V x) {
  const Logistic s = logistic(x);
  return {x * s.of, s.of * (T(1) + x * s.rest), s.of * s.rest * (T(2) + x * (s.rest - s.of))};
}
EQ_FN Curve sigmoid_curve(V x) {
  const Logistic s = logistic(x);
  return {s.of, s.of * s.rest, s.of * s.rest * (s.rest - s.of)};
}
EQ_FN Curve tanh_curve(V x) {
  const Logistic s = logistic(x + x);
  const V value = hyperbolic_tangent(x), slope = T(4) * s.of * s.rest;
  return {value, slope, T(-2) * value * slope};
}
// Softplus, log(1 + exp(x)), less log 2; a line above 20, as torch has it.
EQ_FN Curve ssp_curve(V x) {
  const Logistic s = logistic(x);
  const V curved = (x > T(0) ? x : splat(T(0))) + log_of_sum(s.decayed);
  const auto is_line = x > T(20);
  const V value = (is_line ? x : curved) - T(0.69314718055994531);
  return {value, is_line ? splat(T(1)) : s.of, is_line ? splat(T(0)) : s.of * s.rest};
}
EQ_FN Curve abs_curve(V x) {
  const V zero = splat(T(0)), one = splat(T(1));
  return {x >= T(0) ? x : -x, x > T(0) ? one : x < T(0) ? -one : zero, zero};
}

}  // namespace

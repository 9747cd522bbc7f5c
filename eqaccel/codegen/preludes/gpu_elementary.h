// GPU: what elementary.h needs of the machine, and functions that it has: exponential, hyperbolic tangent, logarithm.
#pragma once
#include "gpu_lane.h"

namespace {

typedef T V;

// What rounding took from the product of a and b.
EQ_FN V product_error(V a, V b, V product) {
  if constexpr (sizeof(T) == 8) return ::fma(double(a), double(b), -double(product));
  else return ::fmaf(float(a), float(b), -float(product));
}
// exp(-v) of a number that is not negative.
EQ_FN V decay(V v) {
  if constexpr (sizeof(T) == 8) return ::exp(-double(v));
  else return ::expf(-float(v));
}
// 1 / v of a number from 1 to 2: in float32 off by two units of the last place at most, in a third of the time of a division.
EQ_FN V inverse(V v) {
  if constexpr (sizeof(T) == 8) return T(1) / v;
  else return __fdividef(1.0f, float(v));
}
EQ_FN V hyperbolic_tangent(V v) {
  if constexpr (sizeof(T) == 8) return ::tanh(double(v));
  else return ::tanhf(float(v));
}
// log(1 + v).
EQ_FN V log_of_sum(V v) {
  if constexpr (sizeof(T) == 8) return ::log1p(double(v));
  else return ::log1pf(float(v));
}

}  // namespace

#include "elementary.h"

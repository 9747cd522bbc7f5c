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

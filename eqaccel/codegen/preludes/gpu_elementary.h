// GPU: what elementary.h needs of the machine, and the exponential function.
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

}  // namespace

#include "elementary.h"

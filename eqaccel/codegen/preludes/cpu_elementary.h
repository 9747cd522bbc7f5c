// CPU: what elementary.h needs of the machine, and functions: exponential, hyperbolic tangent, logarithm.
#pragma once
#include "cpu_lane.h"

namespace {

typedef Lane V;

// What rounding took from the product of a and b, on machines that can tell at no cost.
EQ_FN V product_error(V a, V b, V product) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  V error;
  for (int u = 0; u < lanes; ++u)
    error[u] = sizeof(T) == 8 ? T(__builtin_fma(a[u], b[u], -product[u]))
                              : T(__builtin_fmaf(float(a[u]), float(b[u]), -float(product[u])));
  return error;
#else
  return V{};
#endif
}

}  // namespace

#include "elementary.h"

namespace {

template <int j>
struct Exponential {
  static constexpr double value = 1 / Factorial<j>::value;
};

// exp(-v) of numbers that are not negative; below the smallest normal number it is that.
EQ_FN V decay(V v) {
  typedef decltype(v < v) Bits;  // integers of the size of T
  const T most = T(is_double ? 708 : 87);
  const V capped = v > most ? splat(most) : v;
  const V doublings = nearest(capped * T(1.4426950408889634));
  const T first = T(is_double ? 0.6931471805598903 : 0.693359375);
  const T second = T(is_double ? 5.497923018708371e-14 : -2.1219444005469057e-4);
  const V rest = (capped - doublings * first) - doublings * second;
  const int mantissa = is_double ? 52 : 23, bias = is_double ? 1023 : 127;
  const Bits power = (bias - __builtin_convertvector(doublings, Bits)) << mantissa;
  return alternating<Exponential, 0, is_double ? 13 : 7>(rest) * (V)power;
}

// 1 / v of numbers from 1 to 2.
EQ_FN V inverse(V v) { return T(1) / v; }

// Functions of the C library, an element at a time.
EQ_FN V hyperbolic_tangent(V v) {
  for (int u = 0; u < lanes; ++u) v[u] = is_double ? T(__builtin_tanh(v[u])) : T(__builtin_tanhf(float(v[u])));
  return v;
}
// log(1 + v).
EQ_FN V log_of_sum(V v) {
  for (int u = 0; u < lanes; ++u) v[u] = is_double ? T(__builtin_log1p(v[u])) : T(__builtin_log1pf(float(v[u])));
  return v;
}

}  // namespace

// Elementary functions of `V`, which is a number on a GPU and a SIMD vector on a CPU: the same text for both. Series end
// where the first term left out is below rounding.
#pragma once

namespace {

constexpr bool is_double = sizeof(T) == 8;

EQ_FN V splat(T value) { return V{} + value; }
// The nearest whole number, of magnitudes below 2^22, in float64 below 2^51.
EQ_FN V nearest(V v) {
  const T shift = T(is_double ? 6755399441055744.0 : 12582912.0);
  return (v + shift) - shift;
}

template <int n>
struct Factorial {
  static constexpr double value = n * Factorial<n - 1>::value;
};
template <>
struct Factorial<0> {
  static constexpr double value = 1;
};

// Coefficients of z^j: of sin(t)/t and cos(t), and of the first derivative of sin(t)/t, divided by -t, and the second,
// times -1, which begin at j = 1 with the power zero. Here z is t^2, and signs alternate.
template <int j>
struct Sine {
  static constexpr double value = 1 / Factorial<2 * j + 1>::value;
};
template <int j>
struct Cosine {
  static constexpr double value = 1 / Factorial<2 * j>::value;
};
template <int j>
struct Slope {
  static constexpr double value = 2 * j / Factorial<2 * j + 1>::value;
};
template <int j>
struct Curvature {
  static constexpr double value = 2 * j * (2 * j - 1) / Factorial<2 * j + 1>::value;
};
// c_j - c_(j+1) z + c_(j+2) z^2 - ...
template <template <int> class C, int j, int last>
EQ_FN V alternating(V z) {
  if constexpr (j == last) return splat(T(C<j>::value));
  else return splat(T(C<j>::value)) - z * alternating<C, j + 1, last>(z);
}

struct Wave {
  V sine, cosine;
};
// Of (a + rest) b, where the rest is below rounding, and so is what rounding takes from the product: both count. NaN above
// some ten thousand, where digits get lost.
EQ_FN Wave wave(V a, V rest, V b) {
  const V angle = a * b;
  V turns = nearest(angle * T(0.31830988618379067));
  turns = turns * turns < T(1 << 26) ? turns : turns / T(0) * T(0);
  // pi in three parts; products of turns with the first two are exact.
  const T first = T(is_double ? 3.1415926535846666 : 3.140625);
  const T second = T(is_double ? 5.1266883031679116e-12 : 9.675025939941406e-4);
  const T third = T(is_double ? 2.1125998133974855e-23 : 1.5099580252808664e-7);
  const V t = ((angle - turns * first) - turns * second) - turns * third + (product_error(a, b, angle) + rest * b);
  const V half = turns * T(0.5), z = t * t;
  const V sign = half == nearest(half) ? splat(T(1)) : splat(T(-1));
  return {sign * t * alternating<Sine, 0, is_double ? 10 : 6>(z), sign * alternating<Cosine, 0, is_double ? 11 : 7>(z)};
}

}  // namespace

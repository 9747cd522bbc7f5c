// Radial basis functions f_n(r) = factor s(k_n, r) u(r) of an edge, where s(k, r) = sin(k r) / r and u is the polynomial
// cutoff, and their derivatives. Included behind a backend's `Row` and `V`.
#pragma once

namespace {

// A function of r and its derivatives.
struct Radial {
  V value, slope, curvature;
};

// 1 - (p+1)(p+2)/2 x^p + p(p+2) x^(p+1) - p(p+1)/2 x^(p+2) for x = r / r_max. Above one half it is (1 - x)^3 times a sum
// of terms of one sign, so that no digits are lost near the cutoff. All of it is zero there.
template <class P>
EQ_FN Radial cutoff(V r) {
  constexpr int p = P::power;
  if constexpr (p == 0) return {splat(T(1)), V{}, V{}};
  const T inverse = T(1 / P::r_max);
  const V x = r * inverse, left = (T(P::r_max) - r) * inverse;
  V sum = splat(T(p * (p + 1) / 2)), power = splat(T(1));  // of x, to p - 2
#pragma unroll
  for (int j = p - 1; j > 0; --j) sum = sum * x + T(j * (j + 1) / 2);
#pragma unroll
  for (int j = 2; j < p; ++j) power = power * x;
  const V steep = power * left * (T(-0.5 * p * (p + 1) * (p + 2)) * inverse);
  const V fall = power * x * x * (T((p + 1) * (p + 2) / 2) - x * (T(p * (p + 2)) - x * T(p * (p + 1) / 2)));
  const V value = x < T(0.5) ? T(1) - fall : left * left * left * sum;
  return {value, steep * x * left, steep * (T(p - 1) * left - T(2) * x) * inverse};
}

// sin(k r) / r, its derivatives by r, and those by k: cos(k r), and of that by r and by k.
struct Bessel {
  Radial by_r;
  V by_k, by_k_r, by_k_k;
};
EQ_FN Bessel bessel(V k, V rest_of_k, V r) {
  const Wave of = wave(k, rest_of_k, r);
  const V angle = k * r, z = angle * angle, inverse = T(1) / r;
  const V value = of.sine / r, slope = (k * of.cosine - value) * inverse;
  const V curvature = T(-2) * inverse * slope - k * k * value;
  // Near zero the terms of these cancel, and series do not.
  const auto near = z < T(2.25);
  const Radial series = {k * alternating<Sine, 0, is_double ? 10 : 6>(z),
                         k * k * angle * (T(-1) * alternating<Slope, 1, is_double ? 12 : 7>(z)),
                         k * k * k * (T(-1) * alternating<Curvature, 1, is_double ? 12 : 7>(z))};
  const Radial by_r = {near ? series.value : value, near ? series.slope : slope, near ? series.curvature : curvature};
  return {by_r, of.cosine, T(-1) * k * of.sine, T(-1) * r * of.sine};
}

// x is the length and w holds the k_n over their unit, dx and dw their tangents; with no k_n there is one function, the
// cutoff.
template <class P>
EQ_FN void run_row(const Row<P>& in, Row<P>& out) {
  const T factor = T(P::factor), unit = T(P::unit), unit_rest = T(P::unit - double(unit));
  V r = in.x[0];
  if constexpr (P::power > 0) r = r >= T(P::r_max) ? splat(T(P::r_max)) : r;
  if constexpr (P::is_undefined_at_zero) r = r == T(0) ? r / r : r;
  const Radial u = cutoff<P>(r);
  V gx{};
  if constexpr (P::w_dim == 0) {
    if constexpr (writes_z) out.z[0] = factor * (has_tangents ? in.dx[0] * u.slope : u.value);
    gx = in.z[0] * factor * (has_tangents ? in.dx[0] * u.curvature : u.slope);
  }
#pragma unroll
  for (int n = 0; n < P::w_dim; ++n) {
    const V k = unit * in.w[n];
    const Bessel s = bessel(k, product_error(splat(unit), in.w[n], k) + unit_rest * in.w[n], r);
    const V slope = s.by_r.slope * u.value + s.by_r.value * u.slope, by_k = s.by_k * u.value;
    if constexpr (!has_gradient) {
      out.z[n] = factor * (s.by_r.value * u.value);
    } else if constexpr (!has_tangents) {
      const V g = factor * in.z[n];
      gx = gx + g * slope;
      out.w[n] = unit * g * by_k;
    } else {
      const V g = factor * in.z[n], a = in.dx[0], c = unit * in.dw[n];
      const V curvature = s.by_r.curvature * u.value + T(2) * s.by_r.slope * u.slope + s.by_r.value * u.curvature;
      const V by_k_r = s.by_k_r * u.value + s.by_k * u.slope;
      out.z[n] = factor * (a * slope + c * by_k);
      gx = gx + g * (a * curvature + c * by_k_r);
      out.w[n] = unit * g * (a * by_k_r + c * (s.by_k_k * u.value));
    }
  }
  out.x[0] = gx;
}

}  // namespace

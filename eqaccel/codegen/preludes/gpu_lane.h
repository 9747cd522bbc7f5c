// GPU prelude: the lane value type, a few channels of one thread.
#pragma once
#include "machine.h"
#include "weights.h"

namespace {

// Elements of a row that are copied to shared memory: where they are in the row and in the copy, and how many.
struct CopySpan {
  int offset, staged, length;
};

// A term of an entry of an edge matrix: element j of the attributes times a factor.
struct alignas(2 * sizeof(T)) Term {
  T factor;
  short entry, j;
};

template <int n>
struct alignas(n * sizeof(T)) LaneOf {
  T v[n];
};
typedef T Sum;  // over the channels of this lane; lanes are added up once an edge

template <int n>
EQ_FN LaneOf<n> fma(T a, LaneOf<n> b, LaneOf<n> c) {
#pragma unroll
  for (int u = 0; u < n; ++u) c.v[u] += a * b.v[u];
  return c;
}
template <int n>
EQ_FN LaneOf<n> fma(LaneOf<n> a, LaneOf<n> b, LaneOf<n> c) {
#pragma unroll
  for (int u = 0; u < n; ++u) c.v[u] += a.v[u] * b.v[u];
  return c;
}
EQ_FN T fma(T a, T b, T c) { return a * b + c; }
template <int n>
EQ_FN LaneOf<n> operator*(LaneOf<n> a, LaneOf<n> b) {
#pragma unroll
  for (int u = 0; u < n; ++u) b.v[u] *= a.v[u];
  return b;
}
template <int n>
EQ_FN LaneOf<n> operator*(T a, LaneOf<n> b) {
#pragma unroll
  for (int u = 0; u < n; ++u) b.v[u] *= a;
  return b;
}
template <int n>
EQ_FN LaneOf<n> operator+(LaneOf<n> a, LaneOf<n> b) {
#pragma unroll
  for (int u = 0; u < n; ++u) b.v[u] += a.v[u];
  return b;
}
template <int n>
EQ_FN Sum dot(LaneOf<n> a, LaneOf<n> b, Sum sum) {
#pragma unroll
  for (int u = 0; u < n; ++u) sum += a.v[u] * b.v[u];
  return sum;
}
template <int n>
EQ_FN LaneOf<n> load(const T* p, bool active) {
  if (active) return *reinterpret_cast<const LaneOf<n>*>(p);
  LaneOf<n> zero;
#pragma unroll
  for (int u = 0; u < n; ++u) zero.v[u] = 0;
  return zero;
}

template <int n>
EQ_FN LaneOf<n> load(const Bfloat16* p, bool active) {
  struct alignas(n * sizeof(Bfloat16)) Rounded {
    Bfloat16 v[n];
  };
  LaneOf<n> value = load<n>(static_cast<const T*>(nullptr), false);
  if (!active) return value;
  const Rounded rounded = *reinterpret_cast<const Rounded*>(p);
#pragma unroll
  for (int u = 0; u < n; ++u) value.v[u] = __uint_as_float(unsigned(rounded.v[u].bits) << 16);
  return value;
}

// The channels of a lane are visited in one go.
#define EQ_CHANNELS(c, mul) for (int c = 0; c < 1; ++c)

template <int count>
struct Entries {
  T v[(count + 3) / 4 * 4];
  EQ_FN T operator[](int n) const { return v[n]; }
};
template <int first, int count>
EQ_FN Entries<count> read_entries(const T* entries) {
  constexpr int width = 16 / sizeof(T);
  Entries<count> m;
#pragma unroll
  for (int n = 0; n < (count + 3) / 4 * 4; n += width) {
    const LaneOf<width> part = *reinterpret_cast<const LaneOf<width>*>(entries + first + n);
#pragma unroll
    for (int u = 0; u < width; ++u) m.v[n + u] = part.v[u];
  }
  return m;
}

}  // namespace

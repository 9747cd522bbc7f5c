// CPU prelude: the two layouts of a block of a row, (mul, 2l+1) and (2l+1, mul), and the way from one to the other.
#pragma once
#include <type_traits>
#include <utility>

#include "cpu_lane.h"

namespace {

// A vector of elements of two: its lane n has lane Choice::from(n) of the first, or of the second, which count from `lanes`.
template <class Choice, int... n>
EQ_FN Lane choose(Lane a, Lane b, std::integer_sequence<int, n...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, Choice::from(n)...);
#else
  typedef typename std::conditional<sizeof(T) == 4, int32_t, int64_t>::type Number;
  typedef Number Numbers __attribute__((vector_size(EQ_SIMD_BYTES)));
  return __builtin_shuffle(a, b, Numbers{Choice::from(n)...});
#endif
}
template <class Choice>
EQ_FN Lane choose(Lane a, Lane b) {
  return choose<Choice>(a, b, std::make_integer_sequence<int, lanes>());
}

// Component `i` of `lanes` channels whose `dim` components are neighbours in as many vectors: what vector `m` adds to what
// those before it have.
template <int dim, int i, int m>
struct OfComponent {
  static constexpr int from(int u) {
    const int place = u * dim + i;
    return place / lanes == m ? lanes + place % lanes : m == 1 && place < lanes ? place : u;
  }
};
// The inverse: the vector `m` of these, of which component `i` is added to those before it.
template <int dim, int m, int i>
struct OfChannels {
  static constexpr int from(int n) {
    const int place = m * lanes + n;
    return place % dim == i ? lanes + place / dim : i == 1 && place % dim == 0 ? place / dim : n;
  }
};
template <template <int, int, int> class Choice, int dim, int result, int next = 1>
EQ_FN Lane collect(const Lane* vectors, Lane found) {
  if constexpr (next == dim) return found;
  else return collect<Choice, dim, result, next + 1>(vectors, choose<Choice<dim, result, next>>(found, vectors[next]));
}
template <template <int, int, int> class Choice, int dim, int result = 0>
EQ_FN void collect_all(const Lane* vectors, Lane* results) {
  if constexpr (result < dim) {
    results[result] = collect<Choice, dim, result>(vectors, vectors[0]);
    collect_all<Choice, dim, result + 1>(vectors, results);
  }
}

// Vectors of some lanes are chosen from faster than element by element, if components are few.
template <int dim>
constexpr bool by_vectors = EQ_SIMD_BYTES >= 32 && dim <= 9;

// (mul, dim) to (dim, mul), whose components begin `stride` elements apart.
template <int dim>
void to_components(const T* __restrict__ in, int mul, T* __restrict__ out, int stride) {
  int u = 0;
  if constexpr (by_vectors<dim>) {
    for (; u + lanes <= mul; u += lanes) {
      Lane vectors[dim], components[dim];
      for (int m = 0; m < dim; ++m) vectors[m] = *(const UnalignedLane*)(in + u * dim + m * lanes);
      collect_all<OfComponent, dim>(vectors, components);
      for (int i = 0; i < dim; ++i) *(UnalignedLane*)(out + i * stride + u) = components[i];
    }
  }
  for (; u < mul; ++u)
    for (int i = 0; i < dim; ++i) out[i * stride + u] = in[u * dim + i];
}
// Back; with `adds` it is added to what is there.
template <int dim, bool adds>
void to_channels(const T* __restrict__ in, int stride, int mul, T* __restrict__ out) {
  int u = 0;
  if constexpr (by_vectors<dim>) {
    for (; u + lanes <= mul; u += lanes) {
      Lane components[dim], vectors[dim];
      for (int i = 0; i < dim; ++i) components[i] = *(const UnalignedLane*)(in + i * stride + u);
      collect_all<OfChannels, dim>(components, vectors);
      for (int m = 0; m < dim; ++m) {
        UnalignedLane* const to = (UnalignedLane*)(out + u * dim + m * lanes);
        *to = adds ? *to + vectors[m] : vectors[m];
      }
    }
  }
  for (; u < mul; ++u)
    for (int i = 0; i < dim; ++i) {
      T& to = out[u * dim + i];
      to = adds ? to + in[i * stride + u] : in[i * stride + u];
    }
}

// ---- vectors of rows and vectors of elements

// Lane n and lane n + step of two vectors change places, for each n that lacks the bit `step`: what the first has then, and
// the second.
template <int step, bool is_second>
struct Exchanged {
  static constexpr int from(int n) {
    if (n & step) return lanes + n - (is_second ? 0 : step);
    return n + (is_second ? step : 0);
  }
};
// As many vectors as lanes: element n of vector m and element m of vector n change places, bit by bit of their numbers.
template <int step = 1>
EQ_FN void transpose(Lane* rows) {
  if constexpr (step < lanes) {
#pragma GCC unroll 16
    for (int n = 0; n < lanes; ++n) {
      if (n & step) continue;
      const Lane a = rows[n], b = rows[n + step];
      rows[n] = choose<Exchanged<step, false>>(a, b);
      rows[n + step] = choose<Exchanged<step, true>>(a, b);
    }
    transpose<2 * step>(rows);
  }
}

}  // namespace

// CPU prelude: paths of a product on a block of rows of a batch that share their weights. A lane is a row.
//
// Pairs of channels are coupled some at a time. What mixes them, and what makes gradients of it, are products of matrices
// of few rows with arrays in the nearest cache; weights are read once a block, an element for all of its rows. Scalars
// of one operand, if there are some, meet the weights before the other operand, which has several components.
#pragma once
#include <utility>

#include "cpu_pairs.h"

namespace {

constexpr int vectors = 2, height = vectors * lanes;  // rows of a block
constexpr int piece = 16;  // pairs that are coupled at a time
constexpr int most_sums = EQ_SIMD_BYTES == 64 ? 12 : 6;  // of two vectors each, which registers hold

// ---- vectors of rows and vectors of elements

// A vector of elements of two: its lane n has lane Choice::from(n) of the first, or of the second, which count from `lanes`.
template <class Choice, int... n>
EQ_FN Lane choose(Lane a, Lane b, std::integer_sequence<int, n...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, Choice::from(n)...);
#else
  return __builtin_shuffle(a, b, LaneNumbers{Choice::from(n)...});
#endif
}
template <class Choice>
EQ_FN Lane choose(Lane a, Lane b) {
  return choose<Choice>(a, b, std::make_integer_sequence<int, lanes>());
}

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

// Elements of all rows of a block, some rows and elements at a time: load(h, first, n) is a vector of `dim` elements from
// `first` on of the row h + n, or of rows from h on of the element first + n; store(h, first, n, vector) gets the other one.
template <int dim, class Load, class Store>
EQ_FN void transpose_rows(const Load& load, const Store& store) {
  for (int h = 0; h < height; h += lanes)
    for (int first = 0; first < dim; first += lanes) {
      Lane values[lanes];
#pragma GCC unroll 16
      for (int n = 0; n < lanes; ++n) values[n] = load(h, first, n);
      transpose(values);
#pragma GCC unroll 16
      for (int n = 0; n < lanes; ++n) store(h, first, n, values[n]);
    }
}
// Arrays (element, row) of `count` elements as rows, which are padded.
template <int count>
void transpose_arrays(const T* arrays, T* rows) {
  transpose_rows<count>(
      [&](int h, int first, int n) { return first + n < count ? get(arrays + (first + n) * height + h) : Lane{}; },
      [&](int h, int first, int n, Lane values) { put(rows + (h + n) * padded(count) + first, values); });
}

// ---- products of a matrix (rows, terms) with arrays (terms, columns), added to `out` (rows, columns)

// A matrix whose rows are `down_` elements apart, and terms of a row `along_` elements.
template <int down_, int along_>
struct Matrix {
  static constexpr int down = down_, along = along_;
  const T* first;
};

// `columns` of a row of `out`, at most two vectors; `in` is read as whole vectors, of which the rest does not count.
template <int rows, int columns, class M>
EQ_FN void add_product(const M& m, const T* in, int in_stride, int terms, T* out, int out_stride) {
  constexpr int width = (columns + lanes - 1) / lanes;
  Lane sum[rows][width];
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r)
    for (int v = 0; v < width; ++v) sum[r][v] = get_part<columns>(out + r * out_stride, v * lanes);
  const T* factors = m.first;
  for (int n = 0; n < terms; ++n, factors += M::along, in += in_stride) {
    Lane values[width];
    for (int v = 0; v < width; ++v) values[v] = get(in + v * lanes);
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r)
      for (int v = 0; v < width; ++v) sum[r][v] += factors[r * M::down] * values[v];
  }
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r)
    for (int v = 0; v < width; ++v) put_part<columns>(out + r * out_stride, v * lanes, sum[r][v]);
}
// Of any number of rows, in groups that are about as large, and of columns, two vectors at a time.
template <int rows, int columns, class M>
void multiply(const M& m, const T* in, int in_stride, int terms, T* out, int out_stride) {
  constexpr int some = columns < vectors * lanes ? columns : vectors * lanes;
  constexpr int groups = (rows + most_sums - 1) / most_sums, size = (rows + groups - 1) / groups;
  constexpr int whole = rows / size, rest = rows % size;
  M group = m;
  T* to = out;
  for (int n = 0; n < whole; ++n) {
    add_product<size, some>(group, in, in_stride, terms, to, out_stride);
    group.first += size * M::down;
    to += size * out_stride;
  }
  if constexpr (rest > 0) add_product<rest, some>(group, in, in_stride, terms, to, out_stride);
  if constexpr (columns > some) multiply<rows, columns - some>(m, in + some, in_stride, terms, out + some, out_stride);
}

// ---- what paths of a block have in common

// What the paths of a block work with; a direction has what it needs.
struct BlockState {
  T *x, *y, *z, *a, *b, *gz, *gx, *gy;  // arrays (element, row), elements in the order (2l+1, mul) of their irreps
  T* gz_rows;  // the same numbers as rows, padded
  T* rows;  // for other gradients as rows
  T *t, *ta, *gt, *gtc;  // arrays (component, pair, row) of the pairs that are worked on; or those of scalars
  const T *w, *c;
  T* gw;
};

// Components of a channel, of rows `h` and following.
template <int count>
EQ_FN void get_all(const T* array, int mul, int channel, int h, Lane* values) {
#pragma GCC unroll 32
  for (int i = 0; i < count; ++i) values[i] = get(array + (i * mul + channel) * height + h);
}
template <int count>
EQ_FN void put_all(T* array, int mul, int channel, int h, const Lane* values) {
#pragma GCC unroll 32
  for (int i = 0; i < count; ++i) put(array + (i * mul + channel) * height + h, values[i]);
}

// A path, of whose pairs some are worked on at a time: `count` of them from `pair` on, the number `first` of all.
template <class S, int z_dim>
struct BlockPath {
  typedef typename S::Coupling C;
  typedef PairsOf<S> Pairs;
  static constexpr int d1 = C::d1, d2 = C::d2, d3 = C::d3, mul1 = S::mul1, mul2 = S::mul2, mul3 = S::mul3;
  static constexpr bool is_dense = S::mixing == dense;

  struct Pair {
    int u, v;
    EQ_FN void next() {
      if (++v < Pairs::end_v(u)) return;
      ++u;
      v = Pairs::first_v(u);
    }
    // The channel of the output that it is added to, where no matrix mixes.
    EQ_FN int channel(int number) const { return S::mixing == own_channels ? number : S::mixing == over_v ? u : v; }
  };

  // t = x y, or with `adds` t += x y.
  template <bool adds>
  static EQ_FN void couple(const T* x, const T* y, Pair pair, int count, T* t) {
    for (int p = 0; p < count; ++p, pair.next()) {
      for (int h = 0; h < height; h += lanes) {
        Lane xs[d1], ys[d2], ts[d3] = {};
        get_all<d1>(x, mul1, pair.u, h, xs);
        get_all<d2>(y, mul2, pair.v, h, ys);
        if (adds) get_all<d3>(t, piece, p, h, ts);
        C::to_z(xs, ys, ts);
        put_all<d3>(t, piece, p, h, ts);
      }
    }
  }
  // Adds to gradients: gx += y gt, gy += x gt.
  static EQ_FN void uncouple(const T* x, const T* y, Pair pair, int count, const T* gt, T* gx, T* gy) {
    for (int p = 0; p < count; ++p, pair.next()) {
      for (int h = 0; h < height; h += lanes) {
        Lane xs[d1], ys[d2], gs[d3], of_x[d1], of_y[d2];
        get_all<d3>(gt, piece, p, h, gs);
        get_all<d2>(y, mul2, pair.v, h, ys);
        get_all<d1>(gx, mul1, pair.u, h, of_x);
        C::to_x(ys, gs, of_x);
        put_all<d1>(gx, mul1, pair.u, h, of_x);
        get_all<d1>(x, mul1, pair.u, h, xs);
        get_all<d2>(gy, mul2, pair.v, h, of_y);
        C::to_y(xs, gs, of_y);
        put_all<d2>(gy, mul2, pair.v, h, of_y);
      }
    }
  }

  // The matrix (pair, channel) of weights, and its transpose; all ones if there are none.
  typedef Matrix<S::weighted ? mul3 : 0, S::weighted ? 1 : 0> OfPairs;
  typedef Matrix<OfPairs::along, OfPairs::down> OfChannels;
  static EQ_FN const T* weights(const T* w, int first) {
    static constexpr T one = 1;
    return S::weighted ? w + first * mul3 : &one;
  }
  static EQ_FN T weight(const T* w, int number) { return S::weighted ? w[number] : T(1); }

  // Adds to z what becomes of t.
  static EQ_FN void mix(const T* w, int first, Pair pair, int count, const T* t, T* z) {
    if constexpr (is_dense) {
      for (int k = 0; k < d3; ++k)
        multiply<mul3, height>(OfChannels{weights(w, first)}, t + k * piece * height, height, count,
                               z + k * mul3 * height, height);
    } else {
      for (int p = 0; p < count; ++p, pair.next()) {
        const T factor = weight(w, first + p);
        const int channel = pair.channel(first + p);
        for (int k = 0; k < d3; ++k)
          for (int h = 0; h < height; h += lanes) {
            T* const to = z + (k * mul3 + channel) * height + h;
            put(to, get(to) + factor * get(t + (k * piece + p) * height + h));
          }
      }
    }
  }
  // gt = what gz becomes.
  template <int count>
  static EQ_FN void unmix(const T* w, int first, Pair pair, const T* gz, T* gt) {
    if constexpr (is_dense) {
      for (int k = 0; k < d3; ++k) {
        T* const to = gt + k * piece * height;
        memset(to, 0, count * height * sizeof(T));
        multiply<count, height>(OfPairs{weights(w, first)}, gz + k * mul3 * height, height, mul3, to, height);
      }
    } else {
      for (int p = 0; p < count; ++p, pair.next()) {
        const T factor = weight(w, first + p);
        const int channel = pair.channel(first + p);
        for (int k = 0; k < d3; ++k)
          for (int h = 0; h < height; h += lanes)
            put(gt + (k * piece + p) * height + h, factor * get(gz + (k * mul3 + channel) * height + h));
      }
    }
  }
  // Adds the gradients of the weights of these pairs, summed over rows.
  template <int count>
  static EQ_FN void add_weights(const T* t, const T* gz, const T* gz_rows, int first, Pair pair, T* gw) {
    if constexpr (!S::weighted) {
    } else if constexpr (!is_dense) {
      for (int p = 0; p < count; ++p, pair.next()) {
        const int channel = pair.channel(first + p);
        Lane sum = {};
        for (int k = 0; k < d3; ++k)
          for (int h = 0; h < height; h += lanes)
            sum += get(t + (k * piece + p) * height + h) * get(gz + (k * mul3 + channel) * height + h);
        gw[first + p] += sum_of(sum);
      }
    } else {
      for (int k = 0; k < d3; ++k) {
        const Matrix<height, 1> of_rows{t + k * piece * height};
        multiply<count, mul3>(of_rows, gz_rows + k * mul3, padded(z_dim), height, gw + first * mul3, mul3);
      }
    }
  }

  template <int count>
  static void run_piece(const BlockState& e, const PathPlace& at, int first, Pair pair) {
    const T *x = e.x + at.x * height, *y = e.y + at.y * height, *gz = e.gz + at.z * height, *gz_rows = e.gz_rows + at.z;
    const T *w = e.w + at.w, *c = e.c + at.w;
    T *z = e.z + at.z * height, *gx = e.gx + at.x * height, *gy = e.gy + at.y * height, *gw = e.gw + at.w;
    if constexpr (!has_gradient) {
      couple<false>(x, y, pair, count, e.t);
      mix(w, first, pair, count, e.t, z);
    } else if constexpr (!has_tangents) {
      unmix<count>(w, first, pair, gz, e.gt);
      if constexpr (S::weighted) {
        couple<false>(x, y, pair, count, e.t);
        add_weights<count>(e.t, gz, gz_rows, first, pair, gw);
      }
      uncouple(x, y, pair, count, e.gt, gx, gy);
    } else {
      const T *a = e.a + at.x * height, *b = e.b + at.y * height;
      couple<false>(a, y, pair, count, e.ta);
      couple<true>(x, b, pair, count, e.ta);
      mix(w, first, pair, count, e.ta, z);
      unmix<count>(w, first, pair, gz, e.gt);
      add_weights<count>(e.ta, gz, gz_rows, first, pair, gw);
      uncouple(a, b, pair, count, e.gt, gx, gy);
      if constexpr (S::weighted) {
        couple<false>(x, y, pair, count, e.t);
        mix(c, first, pair, count, e.t, z);
        unmix<count>(c, first, pair, gz, e.gtc);
        uncouple(x, y, pair, count, e.gtc, gx, gy);
      }
    }
  }
  static __attribute__((noinline)) void run(const BlockState& e, const PathPlace& at) {
    Pair pair{0, Pairs::first_v(0)};
    int first = 0;
    for (; first + piece <= Pairs::count; first += piece) {
      run_piece<piece>(e, at, first, pair);
      for (int p = 0; p < piece; ++p) pair.next();
    }
    if constexpr (Pairs::count % piece > 0) run_piece<Pairs::count % piece>(e, at, first, pair);
  }
};

// A path of which one operand has scalars, some, and the other one components. For a channel of the other operand the
// scalars times the weights are s[w] = sum_n W[n, w] scalar[n], and its coupling with a scalar of one is q[k]: it adds
// q[k] s[w] to z[k, w].
template <class S, int z_dim>
struct ScalarPath {
  typedef typename S::Coupling C;
  static constexpr bool of_x = C::d1 == 1;  // whether these are scalars of x
  static constexpr int d3 = C::d3, d = of_x ? C::d2 : C::d1, mul3 = S::mul3;
  static constexpr int scalars = of_x ? S::mul1 : S::mul2, others = of_x ? S::mul2 : S::mul1;
  // Weights are (u, v, w).
  static constexpr int of_scalar = of_x ? S::mul2 * mul3 : mul3, of_other = of_x ? mul3 : S::mul2 * mul3;

  // Components of the coupling of one with a channel of the other operand, and the gradient of the latter.
  static EQ_FN void couple(const T* other, int channel, int h, Lane* q) {
    const Lane one = Lane{} + T(1);
    Lane values[d];
    get_all<d>(other, others, channel, h, values);
    for (int k = 0; k < d3; ++k) q[k] = Lane{};
    if constexpr (of_x) C::to_z(&one, values, q);
    else C::to_z(values, &one, q);
  }
  static EQ_FN void uncouple(const Lane* gq, int channel, int h, T* of_other) {
    const Lane one = Lane{} + T(1);
    Lane values[d];
    get_all<d>(of_other, others, channel, h, values);
    if constexpr (of_x) C::to_y(&one, gq, values);
    else C::to_x(&one, gq, values);
    put_all<d>(of_other, others, channel, h, values);
  }
  // z += q s
  static EQ_FN void add_outer(const T* other, int channel, const T* s, T* z) {
    for (int h = 0; h < height; h += lanes) {
      Lane q[d3];
      couple(other, channel, h, q);
      for (int w = 0; w < mul3; ++w) {
        const Lane value = get(s + w * height + h);
        for (int k = 0; k < d3; ++k) {
          T* const to = z + (k * mul3 + w) * height + h;
          put(to, get(to) + q[k] * value);
        }
      }
    }
  }
  // gs = q gz, the gradient of s; and if s is given the gradient of the other operand, to which s gz adds.
  static EQ_FN void contract(const T* other, int channel, const T* gz, T* gs, const T* s, T* of_other) {
    for (int h = 0; h < height; h += lanes) {
      Lane q[d3], gq[d3] = {};
      couple(other, channel, h, q);
      for (int w = 0; w < mul3; ++w) {
        const Lane value = s ? get(s + w * height + h) : Lane{};
        Lane sum = {};
        for (int k = 0; k < d3; ++k) {
          const Lane g = get(gz + (k * mul3 + w) * height + h);
          sum += q[k] * g;
          if (s) gq[k] += g * value;
        }
        put(gs + w * height + h, sum);
      }
      if (s) uncouple(gq, channel, h, of_other);
    }
  }
  // s = W scalar, or with `adds` added to it.
  static EQ_FN void mix(const T* w, const T* scalar, T* s, bool adds) {
    if (!adds) memset(s, 0, mul3 * height * sizeof(T));
    multiply<mul3, height>(Matrix<1, of_scalar>{w}, scalar, height, scalars, s, height);
  }
  // Adds the gradient of the scalars, of that of s.
  static EQ_FN void unmix(const T* w, const T* gs, T* of_scalars) {
    multiply<scalars, height>(Matrix<of_scalar, 1>{w}, gs, height, mul3, of_scalars, height);
  }
  // Adds the gradient of the weights, summed over rows; `rows` is for gs as rows.
  static EQ_FN void add_weights(const T* scalar, const T* gs, T* rows, T* gw) {
    transpose_arrays<mul3>(gs, rows);
    multiply<scalars, mul3>(Matrix<height, 1>{scalar}, rows, padded(mul3), height, gw, of_scalar);
  }

  static __attribute__((noinline)) void run(const BlockState& e, const PathPlace& at) {
    const int of_scalars = (of_x ? at.x : at.y) * height, of_others = (of_x ? at.y : at.x) * height;
    const T *scalar = (of_x ? e.x : e.y) + of_scalars, *other = (of_x ? e.y : e.x) + of_others;
    T *const g_scalar = (of_x ? e.gx : e.gy) + of_scalars, *const g_other = (of_x ? e.gy : e.gx) + of_others;
    T *const z = e.z + at.z * height, *const s = e.t;
    const T* const gz = e.gz + at.z * height;
    for (int channel = 0; channel < others; ++channel) {
      const T* const w = e.w + at.w + channel * of_other;
      mix(w, scalar, s, false);
      if constexpr (!has_gradient) {
        add_outer(other, channel, s, z);
      } else {
        T* const gw = e.gw + at.w + channel * of_other;
        if constexpr (!has_tangents) {
          contract(other, channel, gz, e.gt, s, g_other);
          unmix(w, e.gt, g_scalar);
          add_weights(scalar, e.gt, e.rows, gw);
        } else {
          const T *t_scalar = (of_x ? e.a : e.b) + of_scalars, *t_other = (of_x ? e.b : e.a) + of_others;
          const T* const c = e.c + at.w + channel * of_other;
          T* const ts = e.ta;  // of tangents
          mix(w, t_scalar, ts, false);
          mix(c, scalar, ts, true);
          add_outer(other, channel, ts, z);
          add_outer(t_other, channel, s, z);
          contract(other, channel, gz, e.gt, ts, g_other);
          contract(t_other, channel, gz, e.gtc, nullptr, nullptr);
          unmix(c, e.gt, g_scalar);
          unmix(w, e.gtc, g_scalar);
          add_weights(t_scalar, e.gt, e.rows, gw);
          add_weights(scalar, e.gtc, e.rows, gw);
        }
      }
    }
  }
};

// The way in which a path is computed.
template <class S>
constexpr bool scalars_first() {
  typedef typename S::Coupling C;
  constexpr int scalars = C::d1 == 1 ? S::mul1 : C::d2 == 1 ? S::mul2 : 0, fewest = 4;  // else there is little to save
  return S::mixing == dense && S::pairs_kind == all_pairs && S::weighted && C::d3 > 1 && scalars >= fewest;
}
template <class S, int z_dim>
using PathOf = typename std::conditional<scalars_first<S>(), ScalarPath<S, z_dim>, BlockPath<S, z_dim>>::type;

}  // namespace

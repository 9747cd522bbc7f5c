// CPU prelude of tensor products of any mode whose rows, those of a batch, share their weights: a lane is a row.
//
// Rows are taken in blocks, which are transposed: an array holds an element of all rows, two SIMD vectors, then the next.
// Pairs of channels are coupled some at a time. What mixes them, and what makes gradients of it, are products of matrices
// of few rows with arrays in the nearest cache; weights are read once a block, an element for all of its rows.
#pragma once
#include <utility>

#include "cpu_pairs.h"

namespace {

constexpr int vectors = 2, height = vectors * lanes;  // rows of a block
constexpr int piece = 16;  // pairs that are coupled at a time
constexpr int most_sums = EQ_SIMD_BYTES == 64 ? 12 : 6;  // of two vectors each, which registers hold

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
// Of any number of rows: in groups that are about as large.
template <int rows, int columns, class M>
void multiply(M m, const T* in, int in_stride, int terms, T* out, int out_stride) {
  constexpr int groups = (rows + most_sums - 1) / most_sums, size = (rows + groups - 1) / groups;
  constexpr int whole = rows / size, rest = rows % size;
  for (int n = 0; n < whole; ++n) {
    add_product<size, columns>(m, in, in_stride, terms, out, out_stride);
    m.first += size * M::down;
    out += size * out_stride;
  }
  if constexpr (rest > 0) add_product<rest, columns>(m, in, in_stride, terms, out, out_stride);
}

// ---- a block of rows

// What the paths of a block work with; a direction has what it needs.
struct BlockState {
  T *x, *y, *z, *a, *b, *gz, *gx, *gy;  // arrays (element, row), elements in the order (2l+1, mul) of their irreps
  T* gz_rows;  // the same numbers as rows, elements in this order
  T *t, *ta, *gt, *gtc;  // arrays (component, pair, row) of the pairs that are worked on
  const T *w, *c;
  T* gw;
};

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

  // Components of a channel, of rows `h` and following.
  template <int count>
  static EQ_FN void get_all(const T* array, int mul, int channel, int h, Lane* values) {
#pragma GCC unroll 32
    for (int i = 0; i < count; ++i) values[i] = get(array + (i * mul + channel) * height + h);
  }
  template <int count>
  static EQ_FN void put_all(T* array, int mul, int channel, int h, const Lane* values) {
#pragma GCC unroll 32
    for (int i = 0; i < count; ++i) put(array + (i * mul + channel) * height + h, values[i]);
  }

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
  template <int count, int column = 0>
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
    } else if constexpr (column < mul3) {
      constexpr int columns = mul3 - column < vectors * lanes ? mul3 - column : vectors * lanes;
      for (int k = 0; k < d3; ++k) {
        const Matrix<height, 1> of_rows{t + k * piece * height};
        multiply<count, columns>(of_rows, gz_rows + k * mul3 + column, z_dim, height, gw + first * mul3 + column, mul3);
      }
      add_weights<count, column + columns>(t, gz, gz_rows, first, pair, gw);
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

// ---- rows to arrays and back

// A vector of what two have, of which lane n and lane n + step change places, for each n that lacks the bit `step`.
template <int step, bool is_second, int... n>
EQ_FN Lane exchanged(Lane a, Lane b, std::integer_sequence<int, n...>) {
#define EQ_FROM(n) ((n & step) ? lanes + n - (is_second ? 0 : step) : n + (is_second ? step : 0))
#if defined(__clang__)
  return __builtin_shufflevector(a, b, EQ_FROM(n)...);
#else
  typedef typename std::conditional<sizeof(T) == 4, int32_t, int64_t>::type Number;
  typedef Number Numbers __attribute__((vector_size(EQ_SIMD_BYTES)));
  return __builtin_shuffle(a, b, Numbers{EQ_FROM(n)...});
#endif
#undef EQ_FROM
}
// As many vectors as lanes: element n of vector m and element m of vector n change places, bit by bit of their numbers.
template <int step = 1>
EQ_FN void transpose(Lane* rows) {
  if constexpr (step < lanes) {
    constexpr std::make_integer_sequence<int, lanes> all{};
#pragma GCC unroll 16
    for (int n = 0; n < lanes; ++n) {
      if (n & step) continue;
      const Lane a = rows[n], b = rows[n + step];
      rows[n] = exchanged<step, false>(a, b, all);
      rows[n + step] = exchanged<step, true>(a, b, all);
    }
    transpose<2 * step>(rows);
  }
}

// Rows of `dim` elements of irreps, (mul, 2l+1) or (2l+1, mul) in each block, and arrays, whose elements have the latter
// order. Of rows that are not there, elements are zero, or are not written.
template <class Blocks, int dim>
class Transposed {
 public:
  explicit Transposed(bool is_mul_ir) { set_places(is_mul_ir); }

  void fill(const T* rows, int count, T* arrays) const {
    for (int h = 0; h < height; h += lanes)
      for (int first = 0; first < dim; first += lanes) {
        Lane values[lanes];
#pragma GCC unroll 16
        for (int r = 0; r < lanes; ++r)
          values[r] = h + r < count ? get_part<dim>(rows + (h + r) * int64_t(dim), first) : Lane{};
        transpose(values);
#pragma GCC unroll 16
        for (int n = 0; n < lanes; ++n)
          if (first + n < dim) put(arrays + place_[first + n] * height + h, values[n]);
      }
  }
  void empty(const T* arrays, int count, T* rows) const {
    for (int h = 0; h < height; h += lanes)
      for (int first = 0; first < dim; first += lanes) {
        Lane values[lanes];
#pragma GCC unroll 16
        for (int n = 0; n < lanes; ++n)
          values[n] = first + n < dim ? get(arrays + place_[first + n] * height + h) : Lane{};
        transpose(values);
#pragma GCC unroll 16
        for (int r = 0; r < lanes; ++r)
          if (h + r < count) put_part<dim>(rows + (h + r) * int64_t(dim), first, values[r]);
      }
  }

 private:
  template <int n = 0>
  void set_places(bool is_mul_ir) {
    if constexpr (n < Blocks::count) {
      constexpr RowBlock b = Blocks::block(n);
      for (int i = 0; i < b.dim; ++i)
        for (int u = 0; u < b.mul; ++u)
          place_[b.offset + (is_mul_ir ? u * b.dim + i : i * b.mul + u)] = b.offset + i * b.mul + u;
      set_places<n + 1>(is_mul_ir);
    }
  }
  int place_[dim > 0 ? dim : 1];  // in arrays, of each element of a row
};

template <class P>
struct BlockWorker {
  static constexpr int64_t array = P::d3 * piece * height;
  static constexpr int64_t rows = height * P::z_dim + vectors * lanes;  // read as whole vectors
  static constexpr int64_t elements = height * (3 * (P::x_dim + P::y_dim) + 2 * P::z_dim) + rows + 4 * array;

  const eq_operands& o;
  const Transposed<typename P::X, P::x_dim> x_rows;
  const Transposed<typename P::Y, P::y_dim> y_rows;
  const Transposed<typename P::Z, P::z_dim> z_rows, z_ordered;
  BlockState e;
  int64_t first = 0;
  int count = 0;  // rows of the block

  BlockWorker(const eq_operands& operands, T* memory)
      : o(operands), x_rows(o.mul_ir), y_rows(true), z_rows(o.mul_ir), z_ordered(false), e() {
    memset(memory, 0, elements * sizeof(T));
    const auto take = [&](int64_t size) {
      memory += size;
      return memory - size;
    };
    T **const of_x[] = {&e.x, &e.a, &e.gx}, **const of_y[] = {&e.y, &e.b, &e.gy}, **const of_z[] = {&e.z, &e.gz};
    T** const arrays[] = {&e.t, &e.ta, &e.gt, &e.gtc};
    for (T** each : arrays) *each = take(array);
    for (T** each : of_x) *each = take(height * P::x_dim);
    for (T** each : of_y) *each = take(height * P::y_dim);
    for (T** each : of_z) *each = take(height * P::z_dim);
    e.gz_rows = take(rows);
    e.w = static_cast<const T*>(o.w);
    e.c = static_cast<const T*>(o.c);
  }

  template <class Blocks, int dim>
  void fill(const Transposed<Blocks, dim>& order, const void* rows, T* arrays) const {
    order.fill(static_cast<const T*>(rows) + first * dim, count, arrays);
  }
  template <class Blocks, int dim>
  void empty(const Transposed<Blocks, dim>& order, const T* arrays, void* rows) const {
    order.empty(arrays, count, static_cast<T*>(rows) + first * dim);
  }

  // The block of this number; adds gradients of weights to `gw`.
  void run(int64_t number, T* gw) {
    first = number * height;
    count = o.num_edges - first < height ? o.num_edges - first : height;
    fill(x_rows, o.x, e.x);
    fill(y_rows, o.y, e.y);
    if (has_tangents) {
      fill(x_rows, o.a, e.a);
      fill(y_rows, o.b, e.b);
    }
    if (writes_z) memset(e.z, 0, height * P::z_dim * sizeof(T));
    if (has_gradient) {
      fill(z_rows, o.gz, e.gz);
      z_ordered.empty(e.gz, height, e.gz_rows);
      memset(e.gx, 0, height * P::x_dim * sizeof(T));
      memset(e.gy, 0, height * P::y_dim * sizeof(T));
      e.gw = gw;
    }
    P::each_shape([&](auto shape) {
      typedef decltype(shape) S;
      for (int n = 0; n < S::paths; ++n) {
        const PathPlace at = S::place(n);
        BlockPath<S, P::z_dim>::run(e, at);
      }
    });
    if (writes_z) empty(z_rows, e.z, o.z);
    if (!has_gradient) return;
    empty(x_rows, e.gx, o.gx);
    empty(y_rows, e.gy, o.gy);
  }
};

inline int64_t block_count(const eq_operands& o) { return (o.num_edges + height - 1) / height; }
// Gradients of weights are added up over some blocks each, and these sums in order: results do not depend on threads.
inline int64_t sum_count(const eq_operands& o) {
  constexpr int64_t most = 48, least_blocks = 4;
  const int64_t count = block_count(o) / least_blocks;
  return !has_gradient ? 0 : count < 1 ? 1 : count < most ? count : most;
}

// Whether rows share their weights, and their gradient is one row.
inline bool shares_weights(const eq_operands& o) { return !o.row_ptr && o.w_stride == 0 && o.c_stride == 0; }

template <class P>
void launch_blocks(const eq_operands& o) {
  const Scratch memory(BlockWorker<P>::elements, o.threads);
  const int64_t blocks = block_count(o), sums = sum_count(o);
  T* const space = static_cast<T*>(o.workspace);
#pragma omp parallel num_threads(o.threads)
  {
    BlockWorker<P> worker(o, memory.own());
    if constexpr (!has_gradient) {
#pragma omp for schedule(dynamic, 1)
      for (int64_t block = 0; block < blocks; ++block) worker.run(block, nullptr);
    } else {
#pragma omp for schedule(dynamic, 1)
      for (int64_t sum = 0; sum < sums; ++sum) {
        T* const gw = space + sum * P::w_dim;
        memset(gw, 0, P::w_dim * sizeof(T));
        for (int64_t block = sum * blocks / sums; block < (sum + 1) * blocks / sums; ++block) worker.run(block, gw);
      }
      T* const gw = static_cast<T*>(o.gw);
#pragma omp for schedule(static)
      for (int64_t n = 0; n < P::w_dim; ++n) {
        T total = space[n];
        for (int64_t sum = 1; sum < sums; ++sum) total += space[sum * P::w_dim + n];
        gw[n] = total;
      }
    }
  }
}

}  // namespace

#define EQ_EXPORT_ROW_BLOCKS(P)                                                                                        \
  extern "C" __attribute__((visibility("default"))) void eq_launch(const eq_operands* o) {                             \
    if (shares_weights(*o)) launch_blocks<P>(*o);                                                                      \
    else launch_pairs<P>(*o);                                                                                          \
  }                                                                                                                    \
                                                                                                                       \
  extern "C" __attribute__((visibility("default"))) int64_t eq_workspace_bytes(const eq_operands* o) {                 \
    return (shares_weights(*o) ? sum_count(*o) * P::w_dim : pair_space<P>(*o)) * int64_t(sizeof(T));                   \
  }

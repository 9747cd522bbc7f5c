// GPU prelude of linear maps: the derivative by weights, a sum over rows and components of products of x and gz.
//
// A block adds up a square of the matrix of an attribute, over a part of the rows; of these it takes those that have the
// attribute. It lists many of them before it multiplies, as a one-hot attribute is that of few rows. A term is a component
// of such a row. Terms go through shared memory, some at a time, while the next ones are on their way to registers. Where
// there are several parts, a second kernel adds them up in their order.
#pragma once
#include "gpu_linear.h"

namespace {

constexpr int weight_threads = 256, weight_warps = weight_threads / 32;
constexpr int weight_depth = 32;  // terms that are in shared memory
constexpr int listed_rows = 2 * weight_threads;

// What a thread adds up are as many rows as columns.
template <int thread_side_>
struct Square {
  static constexpr int thread_side = thread_side_, side = 16 * thread_side, step = side + width;
  static constexpr int size = 2 * weight_depth * step;  // terms of x, and behind them of gz
};

template <class... Squares>
struct WeightShared {
  alignas(16) T numbers[largest(Squares::size...)];
  // Rows that have the attribute, from the first one of the part on, and how much of it; terms of some of these.
  T scales[listed_rows], scale_of[weight_threads];
  int64_t x_at[weight_threads], gz_at[weight_threads];
  int rows[listed_rows];
  unsigned found[weight_warps];
};

template <class P, class Square, class Shared>
struct WeightSquare {
  static constexpr int kinds = P::attributes > 0 ? P::attributes : 1;
  static constexpr int thread_side = Square::thread_side, side = Square::side, step = Square::step;
  static constexpr int lines = weight_threads / side, loads = weight_depth / lines;  // at a time; of a thread
  static constexpr int vector = least(width, thread_side);

  const eq_operands& o;
  Shared& shared;
  Matrix matrix;
  Written block;
  int z, first_x, first_gz;
  T sum[thread_side][thread_side];

  // Lists the rows among `count` from `first` on that have the attribute, behind those that are listed; how many these are
  // then.
  EQ_FN int list_rows(int64_t begin, int64_t first, int count, int listed) {
    const int t = threadIdx.x, warp = t / 32;
    T scale = t < count ? T(1) : T(0);
    if constexpr (P::attributes > 0)
      if (t < count) scale = static_cast<const T*>(o.y)[(first + t) * P::attributes + z];
    const unsigned found = lanes_with(scale != 0);
    if (t % 32 == 0) shared.found[warp] = found;
    __syncthreads();
    int place = listed + __popc(found & ((1u << t % 32) - 1)), end = listed;
#pragma unroll
    for (int n = 0; n < weight_warps; ++n) {
      const int more = __popc(shared.found[n]);
      place += n < warp ? more : 0;
      end += more;
    }
    if (scale != 0) {
      shared.rows[place] = int(first - begin) + t;
      shared.scales[place] = scale;
    }
    __syncthreads();
    return end;
  }
  // Those of rows in the list.
  EQ_FN void list_terms(int first_listed, int terms) {
    const int t = threadIdx.x;
    if (t < terms) {
      const int n = first_listed + t / block.components, c = t % block.components;
      shared.x_at[t] = int64_t(shared.rows[n]) * P::in_dim + c;
      shared.gz_at[t] = int64_t(shared.rows[n]) * P::out_dim + c;
      shared.scale_of[t] = shared.scales[n];
    }
    __syncthreads();
  }
  EQ_FN void load(const T* x, const T* gz, int first, int terms, T (&of_x)[loads], T (&of_gz)[loads]) const {
    const int u = threadIdx.x % side, line = threadIdx.x / side;
    const bool has_x = first_x + u < matrix.mul_in, has_gz = first_gz + u < block.mul;
#pragma unroll
    for (int n = 0; n < loads; ++n) {
      const int k = first + n * lines + line;
      const bool is_one = k < terms;
      of_x[n] = is_one && has_x ? shared.scale_of[k] * x[shared.x_at[k] + u * block.components] : T(0);
      of_gz[n] = is_one && has_gz ? gz[shared.gz_at[k] + u * block.components] : T(0);
    }
  }
  EQ_FN T* x_line(int k) const { return shared.numbers + k * step; }
  EQ_FN T* gz_line(int k) const { return shared.numbers + (weight_depth + k) * step; }
  EQ_FN void put(const T (&of_x)[loads], const T (&of_gz)[loads]) const {
    const int u = threadIdx.x % side, line = threadIdx.x / side;
#pragma unroll
    for (int n = 0; n < loads; ++n) {
      x_line(n * lines + line)[u] = of_x[n];
      gz_line(n * lines + line)[u] = of_gz[n];
    }
  }
  EQ_FN static void move_side(const T* from, T* to) {
#pragma unroll
    for (int n = 0; n < thread_side; n += vector) move<vector>(from + n, to + n);
  }
  EQ_FN void multiply(int terms) {
    const int u = threadIdx.x / 16 * thread_side, w = threadIdx.x % 16 * thread_side;
#pragma unroll 4
    for (int k = 0; k < terms; ++k) {
      alignas(16) T a[thread_side], b[thread_side];
      move_side(x_line(k) + u, a);
      move_side(gz_line(k) + w, b);
#pragma unroll
      for (int i = 0; i < thread_side; ++i)
#pragma unroll
        for (int j = 0; j < thread_side; ++j) sum[i][j] += a[i] * b[j];
    }
  }
  EQ_FN void add_listed(int64_t begin, int listed) {
    const int most = weight_threads / block.components;
    const T* x = static_cast<const T*>(o.x) + begin * P::in_dim + matrix.first + first_x * block.components;
    const T* gz = static_cast<const T*>(o.gz) + begin * P::out_dim + block.first + first_gz * block.components;
    T of_x[loads], of_gz[loads];
    for (int first = 0; first < listed; first += most) {
      const int terms = least(most, listed - first) * block.components;
      list_terms(first, terms);
      load(x, gz, 0, terms, of_x, of_gz);
      for (int k = 0; k < terms; k += weight_depth) {
        put(of_x, of_gz);
        __syncthreads();
        if (k + weight_depth < terms) load(x, gz, k + weight_depth, terms, of_x, of_gz);
        multiply(least(weight_depth, terms - k));
        __syncthreads();
      }
    }
  }
  // Adds up the rows `begin` to `end`.
  EQ_FN void add(int64_t begin, int64_t end) {
#pragma unroll
    for (int i = 0; i < thread_side; ++i)
#pragma unroll
      for (int j = 0; j < thread_side; ++j) sum[i][j] = 0;
    int listed = 0;
    for (int64_t first = begin; first < end; first += weight_threads) {
      const bool is_last = end - first <= weight_threads;
      listed = list_rows(begin, first, is_last ? int(end - first) : weight_threads, listed);
      if (!is_last && listed <= listed_rows - weight_threads) continue;  // there is room
      add_listed(begin, listed);
      listed = 0;
    }
  }
  EQ_FN void write(T* to) const {
    const int u = first_x + threadIdx.x / 16 * thread_side, w = first_gz + threadIdx.x % 16 * thread_side;
#pragma unroll
    for (int i = 0; i < thread_side; ++i) {
      if (u + i >= matrix.mul_in) return;
      alignas(16) T values[thread_side];
#pragma unroll
      for (int j = 0; j < thread_side; ++j) values[j] = matrix.coefficient * sum[i][j];
      T* line = to + matrix.begin + (int64_t(u + i) * kinds + z) * block.mul + w;
      if (w + thread_side <= block.mul && reinterpret_cast<size_t>(line) % (vector * sizeof(T)) == 0) {
        move_side(values, line);
        continue;
      }
#pragma unroll
      for (int j = 0; j < thread_side; ++j)
        if (w + j < block.mul) line[j] = values[j];
    }
  }
};

template <class P, class Square, class Shared>
EQ_FN void add_square(const eq_operands& o, int n, int z, int first_x, int first_gz, int part, int parts,
                      Shared& shared) {
  const Matrix m = P::matrix(n);
  WeightSquare<P, Square, Shared> square{o, shared, m, P::block(m.block), z, first_x, first_gz, {}};
  const int64_t length = (o.num_edges + parts - 1) / parts, begin = length * part, end = begin + length;
  square.add(begin, end < o.num_edges ? end : o.num_edges);
  square.write(parts == 1 ? static_cast<T*>(o.gw) : static_cast<T*>(o.workspace) + part * P::weights);
}

// Parts have their squares one after the other, and these are in the order of matrices, attributes, rows and columns
// (csrc/runtime/linear_weights_kernel.cpp).
template <class P, class... Squares>
EQ_FN void add_weights(const eq_operands& o, int squares, int parts, WeightShared<Squares...>& shared) {
  constexpr int kinds = P::attributes > 0 ? P::attributes : 1;
  const int part = blockIdx.x / squares;
  int left = blockIdx.x % squares;
  for (int n = 0; n < P::matrices; ++n) {
    const Matrix m = P::matrix(n);
    const int side = P::side(n);
    const int beside = (P::block(m.block).mul + side - 1) / side, below = (m.mul_in + side - 1) / side;
    if (left >= kinds * below * beside) {
      left -= kinds * below * beside;
      continue;
    }
    const int z = left / (below * beside), at = left % (below * beside);
    const int first_x = at / beside * side, first_gz = at % beside * side;
    (void)((side == Squares::side && (add_square<P, Squares>(o, n, z, first_x, first_gz, part, parts, shared), true)) ||
           ...);
    return;
  }
}

template <class P>
EQ_FN void add_parts(const eq_operands& o, int parts) {
  const int64_t n = blockIdx.x * int64_t(weight_threads) + threadIdx.x;
  if (n >= P::weights) return;
  const T* from = static_cast<const T*>(o.workspace) + n;
  T sum = 0;
  for (int part = 0; part < parts; ++part) sum += from[part * P::weights];
  static_cast<T*>(o.gw)[n] = sum;
}

}  // namespace

#define EQ_EXPORT_LINEAR_WEIGHTS(P, ...)                                                                               \
  EQ_KERNEL void __launch_bounds__(weight_threads)                                                                     \
      eq_linear_weights(const EQ_PARAMETER eq_operands o, int squares, int parts) {                                    \
    __shared__ WeightShared<__VA_ARGS__> shared;                                                                       \
    add_weights<P>(o, squares, parts, shared);                                                                         \
  }                                                                                                                    \
  EQ_KERNEL void __launch_bounds__(weight_threads)                                                                     \
      eq_linear_weights_sum(const EQ_PARAMETER eq_operands o, int parts) {                                             \
    add_parts<P>(o, parts);                                                                                            \
  }

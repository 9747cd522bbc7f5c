// GPU prelude of linear maps: the derivative by weights, a sum over rows and components of products of x and gz.
//
// A block adds up a square of the matrix of an attribute, over a part of the rows; of these it takes those that have the
// attribute. A term is a component of such a row. Terms go through shared memory, some at a time, while the next ones are
// on their way to registers. Where there are several parts, a second kernel adds them up in their order.
#pragma once
#include "gpu_linear.h"

namespace {

constexpr int weight_threads = 256;
constexpr int weight_depth = 32;  // terms that are in shared memory

template <int thread_side>
struct Square {
  static constexpr int side = 16 * thread_side, step = side + width;
  alignas(16) T x[weight_depth][step], gz[weight_depth][step];
  // Rows that have the attribute, from the first one of some rows on, and how much of it; terms of these.
  int rows[weight_threads], flags[weight_threads];
  T scales[weight_threads];
  int x_at[weight_threads], gz_at[weight_threads];
  T scale_of[weight_threads];
};

template <class P, int thread_side>
struct WeightSquare {
  typedef Square<thread_side> Shared;
  static constexpr int kinds = P::attributes > 0 ? P::attributes : 1, side = Shared::side;
  static constexpr int lines = weight_threads / side, loads = weight_depth / lines;  // at a time; of a thread
  static constexpr int vector = least(width, thread_side);

  const eq_operands& o;
  Shared& shared;
  Matrix matrix;
  Written block;
  int z, first_x, first_gz;
  T sum[thread_side][thread_side];

  // The rows among `count` from `first` on that have the attribute; their number.
  EQ_FN int find(int64_t first, int count) {
    const int t = threadIdx.x;
    T scale = t < count ? T(1) : T(0);
    if constexpr (P::attributes > 0) {
      if (t < count) scale = static_cast<const T*>(o.y)[(first + t) * P::attributes + z];
      if (!__syncthreads_or(scale != 0)) return 0;
    }
    shared.flags[t] = scale != 0;
    __syncthreads();
    int place = 0, found = 0;
    for (int n = 0; n < count; ++n) {
      place += n < t ? shared.flags[n] : 0;
      found += shared.flags[n];
    }
    if (scale != 0) {
      shared.rows[place] = t;
      shared.scales[place] = scale;
    }
    __syncthreads();
    return found;
  }
  EQ_FN void list_terms(int terms) {
    const int t = threadIdx.x;
    if (t < terms) {
      const int n = t / block.components, c = t % block.components;
      shared.x_at[t] = shared.rows[n] * P::in_dim + c;
      shared.gz_at[t] = shared.rows[n] * P::out_dim + c;
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
  EQ_FN void put(const T (&of_x)[loads], const T (&of_gz)[loads]) {
    const int u = threadIdx.x % side, line = threadIdx.x / side;
#pragma unroll
    for (int n = 0; n < loads; ++n) {
      shared.x[n * lines + line][u] = of_x[n];
      shared.gz[n * lines + line][u] = of_gz[n];
    }
  }
  EQ_FN static void read(const T* from, T (&to)[thread_side]) {
#pragma unroll
    for (int n = 0; n < thread_side; n += vector) move<vector>(from + n, to + n);
  }
  EQ_FN void multiply(int terms) {
    const int u = threadIdx.x / 16 * thread_side, w = threadIdx.x % 16 * thread_side;
#pragma unroll 4
    for (int k = 0; k < terms; ++k) {
      alignas(16) T a[thread_side], b[thread_side];
      read(shared.x[k] + u, a);
      read(shared.gz[k] + w, b);
#pragma unroll
      for (int i = 0; i < thread_side; ++i)
#pragma unroll
        for (int j = 0; j < thread_side; ++j) sum[i][j] += a[i] * b[j];
    }
  }
  // Adds up the rows `begin` to `end`.
  EQ_FN void add(int64_t begin, int64_t end) {
#pragma unroll
    for (int i = 0; i < thread_side; ++i)
#pragma unroll
      for (int j = 0; j < thread_side; ++j) sum[i][j] = 0;
    const int most = weight_threads / block.components;
    T of_x[loads], of_gz[loads];
    for (int64_t first = begin; first < end; first += most) {
      const int terms = find(first, end - first < most ? int(end - first) : most) * block.components;
      if (terms == 0) continue;
      list_terms(terms);
      const T* x = static_cast<const T*>(o.x) + first * P::in_dim + matrix.first + first_x * block.components;
      const T* gz = static_cast<const T*>(o.gz) + first * P::out_dim + block.first + first_gz * block.components;
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
  EQ_FN void write(T* to) const {
    const int u = first_x + threadIdx.x / 16 * thread_side, w = first_gz + threadIdx.x % 16 * thread_side;
#pragma unroll
    for (int i = 0; i < thread_side; ++i)
#pragma unroll
      for (int j = 0; j < thread_side; ++j)
        if (u + i < matrix.mul_in && w + j < block.mul)
          to[matrix.begin + (int64_t(u + i) * kinds + z) * block.mul + w + j] = matrix.coefficient * sum[i][j];
  }
};

// Parts have their squares one after the other, and these are in the order of matrices, attributes, rows and columns
// (csrc/runtime/linear_weights_kernel.cpp).
template <class P, int thread_side>
EQ_FN void add_weights(const eq_operands& o, int squares, int parts, Square<thread_side>& shared) {
  constexpr int kinds = P::attributes > 0 ? P::attributes : 1, side = Square<thread_side>::side;
  const int part = blockIdx.x / squares;
  int left = blockIdx.x % squares;
  for (int n = 0; n < P::matrices; ++n) {
    const Matrix m = P::matrix(n);
    const Written block = P::block(m.block);
    const int beside = (block.mul + side - 1) / side, below = (m.mul_in + side - 1) / side;
    if (left >= kinds * below * beside) {
      left -= kinds * below * beside;
      continue;
    }
    const int z = left / (below * beside), at = left % (below * beside);
    WeightSquare<P, thread_side> square{o, shared, m, block, z, at / beside * side, at % beside * side, {}};
    const int64_t length = (o.num_edges + parts - 1) / parts, begin = length * part, end = begin + length;
    square.add(begin, end < o.num_edges ? end : o.num_edges);
    square.write(parts == 1 ? static_cast<T*>(o.gw) : static_cast<T*>(o.workspace) + part * P::weights);
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

#define EQ_EXPORT_LINEAR_WEIGHTS(P, thread_side)                                                                       \
  EQ_KERNEL void __launch_bounds__(weight_threads)                                                                     \
      eq_linear_weights(const EQ_PARAMETER eq_operands o, int squares, int parts) {                                    \
    __shared__ Square<thread_side> shared;                                                                             \
    add_weights<P, thread_side>(o, squares, parts, shared);                                                            \
  }                                                                                                                    \
  EQ_KERNEL void __launch_bounds__(weight_threads)                                                                     \
      eq_linear_weights_sum(const EQ_PARAMETER eq_operands o, int parts) {                                             \
    add_parts<P>(o, parts);                                                                                            \
  }

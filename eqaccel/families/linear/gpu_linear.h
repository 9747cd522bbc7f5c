// GPU prelude of linear maps: a warp multiplies some rows by the matrices of the attributes that these have.
//
// A block takes as many rows as its warps do and a tile of the columns of one output. It puts the rows in the order of
// their first attribute that is not zero, so that rows of the same one meet in a warp. The components of a warp's rows
// are rows of a matrix, of which a lane adds up every 32nd column; each term is read from shared memory, times the
// attribute, by all lanes at once. Weights come from the caches: forward along their rows; backward, where columns are
// far apart, by way of shared memory.
#pragma once
#include "abi.h"
#include "direction.h"
#include "gpu_lane.h"
#include "machine.h"
#include "linear.h"
#include "warp_machine.h"

#define EQ_TABLE __constant__ const

namespace {

constexpr int depth = 64 / sizeof(T);  // terms in shared memory at a time
constexpr int width = 16 / sizeof(T);  // terms that are read as one
constexpr int unrolled = has_gradient ? 1 : 2;  // such parts: with more, registers do not suffice on some machine

template <class P, int components>
struct Group {
  static constexpr int rows = components < P::rows ? P::rows / components : 1;
  static constexpr int height = rows * components;
};
// The most rows of a matrix, and the most rows of the operand.
template <class P>
constexpr int tallest() {
  return P::components > P::rows ? P::components : P::rows;
}

template <class P>
struct Shared {
  static constexpr int columns = 32 * P::vectors;
  static constexpr int weight_stride = columns + 2;  // no two lanes that write meet in a bank
  alignas(16) T x[P::warps][tallest<P>()][depth + width];
  T w[has_gradient ? P::warps : 1][has_gradient ? depth : 1][weight_stride];
  int key[P::warps * P::rows], row[P::warps * P::rows];  // row: -1 where there is none
};

// A warp's part of a block.
template <class P, int components>
struct Warp {
  typedef Group<P, components> G;
  typedef T Sums[G::height][P::vectors];
  typedef T Weights[width][P::vectors];
  static constexpr int elements = G::rows * depth * components, of_lane = (elements + 31) / 32;
  const eq_operands& o;
  const Output& out;
  Shared<P>& shared;
  int64_t first_row;  // of the block
  int first_column;
  int warp, lane;

  // The row of the operand in a place of the group, or -1.
  EQ_FN int64_t row(int place) const {
    const int row = shared.row[warp * G::rows + place];
    return row < 0 ? -1 : first_row + row;
  }
  EQ_FN T attribute(int64_t row, int z) const {
    if constexpr (P::attributes == 0) return 1;
    else return static_cast<const T*>(o.y)[row * P::attributes + z];
  }

  // Lane z tells of attribute `word` * 32 + z whether one of the group's rows has it.
  EQ_FN unsigned used(int word) const {
    if constexpr (P::attributes == 0) return 1;
    const int z = 32 * word + lane;
    bool any = false;
    for (int i = 0; i < G::rows; ++i) {
      const int64_t at = row(i);
      if (at >= 0 && z < P::attributes) any = any || attribute(at, z) != 0;
    }
    return lanes_with(any);
  }

  EQ_FN void read(const Factor& f, int z, int k, T (&values)[of_lane]) const {
    const T* from = static_cast<const T*>(has_gradient ? o.gz : o.x);
    const int left = (f.terms - k) * components;
#pragma unroll
    for (int n = 0; n < of_lane; ++n) {
      const int element = 32 * n + lane, place = element / (depth * components), e = element % (depth * components);
      values[n] = 0;
      if (element >= elements || e >= left) continue;
      const int64_t at = row(place);
      if (at >= 0)
        values[n] = f.coefficient * attribute(at, z) * from[at * P::in_dim + f.first + int64_t(k) * components + e];
    }
  }
  EQ_FN void write_shared(const T (&values)[of_lane]) const {
#pragma unroll
    for (int n = 0; n < of_lane; ++n) {
      const int element = 32 * n + lane, place = element / (depth * components), e = element % (depth * components);
      if (element < elements) shared.x[warp][place * components + e % components][e / components] = values[n];
    }
  }
  // In pieces, so that registers hold what is on its way.
  EQ_FN void write_weights(const Factor& f, int z, int k) const {
    constexpr int count = depth * Shared<P>::columns / 32;
#pragma unroll 16
    for (int n = 0; n < count; ++n) {
      const int element = 32 * n + lane, term = element % depth, column = element / depth;
      const bool inside = k + term < f.terms && first_column + column < out.mul;
      shared.w[warp][term][column] = inside ? *f.weights(o.w, z, k + term, first_column + column) : T(0);
    }
  }
  // Of the terms from `term` on: backward, of those in shared memory, else of all of the factor.
  EQ_FN void read_weights(const Factor& f, int z, int term, Weights& w) const {
#pragma unroll
    for (int q = 0; q < width; ++q)
#pragma unroll
      for (int j = 0; j < P::vectors; ++j) {
        const int column = lane + 32 * j;
        if constexpr (has_gradient) {
          w[q][j] = shared.w[warp][term + q][column];
        } else {
          const bool inside = term + q < f.terms && first_column + column < out.mul;
          w[q][j] = inside ? *f.weights(o.w, z, term + q, first_column + column) : T(0);
        }
      }
  }
  EQ_FN void multiply(int term, const Weights& w, Sums& sum) const {
#pragma unroll
    for (int r = 0; r < G::height; ++r) {
      const LaneOf<width> x = *reinterpret_cast<const LaneOf<width>*>(&shared.x[warp][r][term]);
#pragma unroll
      for (int q = 0; q < width; ++q)
#pragma unroll
        for (int j = 0; j < P::vectors; ++j) sum[r][j] += x.v[q] * w[q][j];
    }
  }

  // Adds the product with one matrix. What comes next is on its way from memory while terms are multiplied.
  EQ_FN void add(const Factor& f, int z, Sums& sum) const {
    T values[of_lane];
    read(f, z, 0, values);
    for (int k = 0; k < f.terms; k += depth) {
      meet_lanes();
      write_shared(values);
      if constexpr (has_gradient) write_weights(f, z, k);
      meet_lanes();
      if (k + depth < f.terms) read(f, z, k + depth, values);
#pragma unroll unrolled
      for (int term = 0; term < depth; term += width) {
        Weights w;
        read_weights(f, z, has_gradient ? term : k + term, w);
        multiply(term, w, sum);
      }
    }
  }

  EQ_FN void run() const {
    Sums sum;
#pragma unroll
    for (int r = 0; r < G::height; ++r)
#pragma unroll
      for (int j = 0; j < P::vectors; ++j) sum[r][j] = 0;
    constexpr int words = P::attributes == 0 ? 1 : (P::attributes + 31) / 32;
    for (int f = out.begin; f < out.end; ++f) {
      const Factor factor = P::factor(f);
      for (int word = 0; word < words; ++word)
        for (unsigned left = used(word); left != 0; left &= left - 1) add(factor, 32 * word + first_lane(left), sum);
    }
    T* to = static_cast<T*>(has_gradient ? o.gx : o.z);
#pragma unroll
    for (int r = 0; r < G::height; ++r) {
      const int64_t at = row(r / components);
#pragma unroll
      for (int j = 0; j < P::vectors; ++j) {
        const int column = first_column + lane + 32 * j;
        if (at >= 0 && column < out.mul)
          to[at * P::out_dim + out.first + int64_t(column) * components + r % components] = sum[r][j];
      }
    }
  }
};

// Puts the rows of a block in order; those past the last one come last.
template <class P>
EQ_FN void sort_rows(const eq_operands& o, Shared<P>& shared, int64_t first, int count) {
  const int lane = threadIdx.x % 32;
  constexpr int none = 0x7fffffff;
  for (int i = threadIdx.x / 32; i < count; i += P::warps) {
    const int64_t row = first + i;
    int key = row < o.num_edges ? none - 1 : none;
    if constexpr (P::attributes > 0) {
      for (int z = 0; row < o.num_edges && key == none - 1 && z < P::attributes; z += 32) {
        const bool has = z + lane < P::attributes && static_cast<const T*>(o.y)[row * P::attributes + z + lane] != 0;
        const unsigned lanes = lanes_with(has);
        if (lanes != 0) key = z + first_lane(lanes);
      }
    }
    if (lane == 0) shared.key[i] = key;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const int key = shared.key[i];
    int place = 0;
    for (int n = 0; n < count; ++n) place += shared.key[n] < key || (shared.key[n] == key && n < i);
    shared.row[place] = key == none ? -1 : i;
  }
  __syncthreads();
}

// The outputs have their blocks one after the other, tiles of columns innermost (csrc/runtime/linear_kernel.cpp).
template <class P>
EQ_FN void run_block(const eq_operands& o, Shared<P>& shared) {
  constexpr int columns = Shared<P>::columns;
  int64_t block = blockIdx.x;
  for (int n = 0; n < P::outputs; ++n) {
    const Output out = P::output(n);
    const int rows = P::warps * (out.components < P::rows ? P::rows / out.components : 1);
    const int tiles = (out.mul + columns - 1) / columns;
    const int64_t blocks = (o.num_edges + rows - 1) / rows * tiles;
    if (block >= blocks) {
      block -= blocks;
      continue;
    }
    const int64_t first = block / tiles * rows;
    sort_rows(o, shared, first, rows);
    P::with_components(out.components, [&](auto tag) {
      const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
      const Warp<P, decltype(tag)::count> part{o, out, shared, first, int(block % tiles) * columns, warp, lane};
      part.run();
    });
    return;
  }
}

}  // namespace

#define EQ_EXPORT_LINEAR(P)                                                                                            \
  EQ_KERNEL void __launch_bounds__(32 * P::warps, 2) eq_linear(const EQ_PARAMETER eq_operands o) {                     \
    __shared__ Shared<P> shared;                                                                                       \
    run_block(o, shared);                                                                                              \
  }

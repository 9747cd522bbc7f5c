// GPU prelude of linear maps: a block multiplies some rows by the matrices of the attributes that these have.
//
// A block takes as many rows and columns of one output as a tile has. It puts the rows in the order of their first
// attribute that is not zero, so that rows of the same one meet in a warp. A thread adds up some rows, with all their
// components, times some columns. Terms go through shared memory, of which several stages are on their way while one is
// multiplied. Each sum has its terms in one order, whatever the tile: a row does not depend on the number of others.
#pragma once
#include "abi.h"
#include "direction.h"
#include "gpu_lane.h"
#include "machine.h"
#include "linear.h"
#include "linear_rows.h"
#include "warp_machine.h"

#define EQ_TABLE __constant__ const

namespace {

constexpr int width = 16 / sizeof(T);  // numbers that are read as one
constexpr int row_lanes = 4, column_lanes = 8;  // of a warp
constexpr int stage_numbers = 45 * 1024 / sizeof(T);  // in shared memory; all machines have 48 KiB without being asked
constexpr int most_stages = 4;

constexpr int least(int a, int b) { return a < b ? a : b; }
template <class... Ints>
constexpr int largest(int first, Ints... others) {
  int most = first;
  ((most = others > most ? others : most), ...);
  return most;
}

// Rows and columns of a thread, warps of a block below and beside each other, and terms that are multiplied at a time,
// or less where irreps have so many components that shared memory does not suffice.
template <int components_, int rows_, int columns_, int row_warps_, int column_warps_, int terms_>
struct Tile {
  static constexpr int components = components_, rows = rows_, columns = columns_;
  static constexpr int row_warps = row_warps_, column_warps = column_warps_, threads = 32 * row_warps * column_warps;
  static constexpr int block_rows = row_lanes * rows * row_warps;
  static constexpr int block_columns = column_lanes * columns * column_warps;
  static constexpr int vector = least(width, columns);  // neighbouring columns, forward

  // From line to line it is an odd number of vectors, so that lanes which read different lines meet in no bank. A line
  // of x is a row; one of weights a term, or backward a column.
  static constexpr int x_step(int depth) { return depth * components + width; }
  static constexpr int w_step(int depth) { return has_gradient ? depth + width : block_columns; }
  static constexpr int stage_size(int depth) {
    return block_rows * x_step(depth) + (has_gradient ? block_columns : depth) * w_step(depth);
  }
  static constexpr int find_depth() {
    int depth = terms_;
    while (depth > width && 2 * stage_size(depth) > stage_numbers) depth /= 2;
    return depth;
  }
  static constexpr int depth = find_depth(), x_size = block_rows * x_step(depth);
  static constexpr int stages = largest(2, least(most_stages, stage_numbers / stage_size(depth)));
  static constexpr int z_step = block_columns * components + 2 * width;
  static constexpr int size = largest(stages * stage_size(depth), block_rows* z_step);
};

template <class P, class... Tiles>
struct Shared {
  alignas(16) T numbers[largest(Tiles::size...)];
  SortedRows<P::attributes, largest(Tiles::block_rows...)> rows;
};

template <int n>
EQ_FN void move(const T* from, T* to) {
  *reinterpret_cast<LaneOf<n>*>(to) = *reinterpret_cast<const LaneOf<n>*>(from);
}
EQ_FN bool is_vector(const T* p, int valid) { return valid >= width && reinterpret_cast<size_t>(p) % 16 == 0; }

// Numbers of a line, to shared memory: of `width`, those that there are, and zeros.
EQ_FN void copy_vector(const T* from, int valid, T* to) {
  if (is_vector(from, valid)) {
    copy_16_bytes(to, from);
    return;
  }
#pragma unroll 1
  for (int i = 0; i < width; ++i) {
    if (i < valid) copy_element(to + i, from + i);
    else to[i] = 0;
  }
}

// Lines of a tile whose vectors are shared out to the threads of a block.
template <int threads, int lines, int length>
struct Share {
  static constexpr int vectors = length / width, count = (lines * vectors + threads - 1) / threads;  // of a thread
  static EQ_FN bool is_one(int n) { return (n + 1) * threads <= lines * vectors || at(n) < lines * vectors; }
  static EQ_FN int line(int n) { return at(n) / vectors; }
  static EQ_FN int element(int n) { return at(n) % vectors * width; }

 private:
  static EQ_FN int at(int n) { return n * threads + int(threadIdx.x); }
};

template <class P, class Tile, class Rows>
struct Block {
  static constexpr int depth = Tile::depth, components = Tile::components, threads = Tile::threads;
  static constexpr int x_step = Tile::x_step(depth), w_step = Tile::w_step(depth);
  typedef Share<threads, Tile::block_rows, depth * components> X;
  typedef Share<threads, has_gradient ? Tile::block_columns : depth, has_gradient ? depth : Tile::block_columns> W;
  typedef Share<threads, Tile::block_rows, Tile::block_columns * components> Z;
  static constexpr int neighbours = has_gradient ? 1 : Tile::vector;  // columns of a thread that are beside each other
  typedef T Sums[Tile::rows][components][Tile::columns];
  static_assert(int64_t(largest(P::in_dim, P::out_dim)) * largest(Tile::block_rows, sorted_together) < 0x7fffffff,
                "rows of a block are counted in 32 bits");
  // What this thread copies of the first terms: of x from the block's first row on, -1 for rows that there are not; null
  // for columns and matrices that there are not.
  struct Sources {
    int x[X::count];
    const T* w[W::count];
  };

  const eq_operands& o;
  const Output& out;
  const Rows& rows;
  T* numbers;
  int first_column;  // of the block
  int warp, lane;

  // Where a thread's rows and columns are in the block.
  EQ_FN int place(int r) const {
    return (warp / Tile::column_warps * Tile::rows + r) * row_lanes + lane / column_lanes;
  }
  EQ_FN int column(int j) const {
    const int first = warp % Tile::column_warps * (column_lanes * Tile::columns) + lane % column_lanes * neighbours;
    return first + j / neighbours * (column_lanes * neighbours) + j % neighbours;
  }
  EQ_FN T attribute(int row, int z) const {
    if constexpr (P::attributes == 0) return 1;
    else return row < 0 || z == P::attributes ? T(0) : first_row(o.y, P::attributes)[row * P::attributes + z];
  }
  // The block's first row.
  EQ_FN const T* first_row(const void* all, int dim) const { return static_cast<const T*>(all) + rows.first * dim; }

  EQ_FN void find(const Factor& f, int z, Sources& sources) const {
    const bool has_matrix = P::attributes == 0 || z < P::attributes;
#pragma unroll
    for (int n = 0; n < X::count; ++n) {
      const int row = X::is_one(n) ? rows.row(X::line(n)) : -1;
      sources.x[n] = row >= 0 && attribute(row, z) != 0 ? row * P::in_dim + X::element(n) : -1;
    }
#pragma unroll
    for (int n = 0; n < W::count; ++n) {
      const int term = has_gradient ? W::element(n) : W::line(n);
      const int column = first_column + (has_gradient ? W::line(n) : W::element(n));
      sources.w[n] = has_matrix && W::is_one(n) && column < out.mul ? f.weights(o.w, z, term, column) : nullptr;
    }
  }
  // Copies the terms from `term` on.
  EQ_FN void copy(const Factor& f, const Sources& sources, int term, T* stage) const {
    const int left = f.terms - term;
    const T* x = first_row(has_gradient ? o.gz : o.x, P::in_dim) + f.first + term * components;
#pragma unroll
    for (int n = 0; n < X::count; ++n)
      if (sources.x[n] >= 0)
        copy_vector(x + sources.x[n], left * components - X::element(n), stage + X::line(n) * x_step + X::element(n));
    T* w = stage + Tile::x_size;
#pragma unroll
    for (int n = 0; n < W::count; ++n) {
      if (sources.w[n] == nullptr) continue;
      const int columns = W::line(n) < left ? out.mul - first_column : 0;
      copy_vector(sources.w[n] + (has_gradient ? term : term * f.stride),
                  (has_gradient ? left : columns) - W::element(n), w + W::line(n) * w_step + W::element(n));
    }
  }

  EQ_FN void multiply(const T* stage, Sums& sum) const {
    constexpr int unrolled = Tile::rows * components * Tile::columns < 24 ? 2 : 1;
    const T *x = stage + place(0) * x_step, *w = stage + Tile::x_size;
#pragma unroll unrolled
    for (int k = 0; k < depth; k += width) {
      alignas(16) T xs[Tile::rows][width * components];
#pragma unroll
      for (int r = 0; r < Tile::rows; ++r)
#pragma unroll
        for (int n = 0; n < width * components; n += width)
          move<width>(x + r * row_lanes * x_step + k * components + n, &xs[r][n]);
      if constexpr (has_gradient) {
#pragma unroll
        for (int j = 0; j < Tile::columns; ++j) {
          alignas(16) T ws[width];
          move<width>(w + column(j) * w_step + k, ws);
#pragma unroll
          for (int q = 0; q < width; ++q) add(xs, q, ws[q], j, sum);
        }
      } else {
#pragma unroll
        for (int q = 0; q < width; ++q)
#pragma unroll
          for (int j = 0; j < Tile::columns; j += neighbours) {
            alignas(16) T ws[neighbours];
            move<neighbours>(w + (k + q) * w_step + column(j), ws);
#pragma unroll
            for (int i = 0; i < neighbours; ++i) add(xs, q, ws[i], j + i, sum);
          }
      }
    }
  }
  EQ_FN static void add(const T (&xs)[Tile::rows][width * components], int q, T w, int j, Sums& sum) {
#pragma unroll
    for (int r = 0; r < Tile::rows; ++r)
#pragma unroll
      for (int i = 0; i < components; ++i) sum[r][i][j] += xs[r][q * components + i] * w;
  }

  // Adds the product with the matrix of an attribute to the rows that have it. Rows without any have the number behind the
  // last, which has no matrix: with them it is zero.
  EQ_FN void take(const Factor& f, int z, bool is_first) const {
    constexpr int stages = Tile::stages;
    Sums sum;
    T scales[Tile::rows];
    bool any = false;
#pragma unroll
    for (int r = 0; r < Tile::rows; ++r) {
      scales[r] = attribute(rows.row(place(r)), z);
      any = any || scales[r] != 0;
      scales[r] *= f.coefficient;
#pragma unroll
      for (int i = 0; i < components; ++i)
#pragma unroll
        for (int j = 0; j < Tile::columns; ++j) sum[r][i][j] = 0;
    }
    const bool is_taken = lanes_with(any) != 0;
    Sources sources;
    find(f, z, sources);
    __syncthreads();  // shared memory is free
    int filled = 0, read = 0;
    for (int term = (1 - stages) * depth; term < f.terms; term += depth) {
      if (term >= 0) {
        wait_copies<stages - 2>();
        __syncthreads();  // all have the next stage, and are done with the one before
      }
      const int ahead = term + (stages - 1) * depth;
      if (ahead < f.terms) copy(f, sources, ahead, numbers + filled * Tile::stage_size(depth));
      commit_copies();
      filled = filled + 1 == stages ? 0 : filled + 1;
      if (term < 0) continue;
      if (is_taken) multiply(numbers + read * Tile::stage_size(depth), sum);
      read = read + 1 == stages ? 0 : read + 1;
    }
    __syncthreads();
    lay_out(sum, scales);
    __syncthreads();
    write(z, is_first);
  }
  // Through shared memory, so that neighbouring lanes write neighbouring numbers.
  EQ_FN void lay_out(const Sums& sum, const T (&scales)[Tile::rows]) const {
#pragma unroll
    for (int r = 0; r < Tile::rows; ++r)
#pragma unroll
      for (int j = 0; j < Tile::columns; j += neighbours) {
        alignas(16) T values[neighbours * components];
#pragma unroll
        for (int i = 0; i < neighbours * components; ++i)
          values[i] = scales[r] * sum[r][i % components][j + i / components];
        T* to = numbers + place(r) * Tile::z_step + column(j) * components;
#pragma unroll
        for (int i = 0; i < neighbours * components; i += neighbours) move<neighbours>(values + i, to + i);
      }
  }
  EQ_FN void write(int z, bool is_first) const {
    const int columns = (out.mul - first_column) * components;
    T* to =
        static_cast<T*>(has_gradient ? o.gx : o.z) + rows.first * P::out_dim + out.first + first_column * components;
#pragma unroll 2
    for (int n = 0; n < Z::count; ++n) {
      if (!Z::is_one(n)) break;
      const int row = rows.row(Z::line(n));
      const bool begins = is_first && rows.first_attribute(Z::line(n)) == z;
      if (row < 0 || !(begins || attribute(row, z) != 0)) continue;
      add_vector(numbers + Z::line(n) * Tile::z_step + Z::element(n), columns - Z::element(n), begins,
                 to + row * P::out_dim + Z::element(n));
    }
  }
  EQ_FN static void add_vector(const T* from, int valid, bool begins, T* to) {
    if (is_vector(to, valid)) {
      auto& sum = *reinterpret_cast<LaneOf<width>*>(to);
      const auto& value = *reinterpret_cast<const LaneOf<width>*>(from);
      sum = begins ? value : sum + value;
      return;
    }
#pragma unroll 1
    for (int i = 0; i < least(width, valid); ++i) to[i] = begins ? from[i] : to[i] + from[i];
  }

  EQ_FN void run() const {
    for (int f = out.begin; f < out.end; ++f) {
      const Factor factor = P::factor(f);
      for (int z = rows.next_attribute(0); z < Rows::kinds; z = rows.next_attribute(z + 1))
        take(factor, z, f == out.begin);
    }
  }
};

// The outputs have their blocks one after the other, tiles of columns innermost (csrc/runtime/linear_kernel.cpp).
template <class P, class... Tiles>
EQ_FN void run_block(const eq_operands& o, Shared<P, Tiles...>& shared) {
  int64_t block = blockIdx.x;
  for (int n = 0; n < P::outputs; ++n) {
    const Output out = P::output(n);
    const auto of_tile = [&](auto... numbers) {
      int chosen = 0;
      ((chosen = out.components == Tiles::components ? numbers : chosen), ...);
      return chosen;
    };
    const int block_rows = of_tile(Tiles::block_rows...), block_columns = of_tile(Tiles::block_columns...);
    const int tiles = (out.mul + block_columns - 1) / block_columns;
    const int64_t blocks = (o.num_edges + block_rows - 1) / block_rows * tiles;
    if (block >= blocks) {
      block -= blocks;
      continue;
    }
    const auto rows = shared.rows.sort(o, block_rows, block / tiles);
    const int first_column = int(block % tiles) * block_columns, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const auto run = [&](auto part) {
      if (out.components == part.components) part.run();
    };
    (run(Block<P, Tiles, decltype(rows)>{o, out, rows, shared.numbers, first_column, warp, lane}), ...);
    return;
  }
}

}  // namespace

// A kernel with tiles for each number of components that there is.
#define EQ_EXPORT_LINEAR(name, block_threads, resident, P, ...)                                                        \
  EQ_KERNEL void __launch_bounds__(block_threads, EQ_RESIDENT(resident)) name(const EQ_PARAMETER eq_operands o) {      \
    __shared__ Shared<P, __VA_ARGS__> shared;                                                                          \
    run_block(o, shared);                                                                                              \
  }

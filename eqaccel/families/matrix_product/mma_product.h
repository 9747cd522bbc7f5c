// C = A B by mma.sync, which all GPUs of compute capability 8.0 and later have.
//
// Blocks go over tiles of C, neighbouring columns first. A warp has rows of its own and all columns of a tile, so it
// splits its rows in registers, once for each of these columns; B, which all warps of a block read, comes split. Of both
// factors, stages of `depth` terms are copied to shared memory ahead of their use. The sums of a stage are made for 16
// columns at a time, so that few of them are in the tensor cores' hands: four chains, which wait for each other less
// than a multiplication takes.
//
// What is multiplied are the transposes, so that all that lanes read at once is in the registers that multiplications take:
// of B the elements of one, which come in this order, and of a row of A four terms, two for each of two of them. That is
// free of bank conflicts: a warp reads 512 bytes of B that lie together, and of A, at a time, 64 bytes of each of two
// rows, whose halves are exchanged in every other row.
//
// The body that follows has these numbers in a struct `P`.
#pragma once
#include "factors.h"

namespace {

template <class P>
struct MmaProduct {
  static constexpr int depth = P::depth, stages = P::stages, width = P::width, parts = P::parts;
  static constexpr int threads = P::block_threads, warp_rows = 32, height = threads / 32 * warp_rows;
  static constexpr int steps_of_stage = depth / 8;
  static constexpr int a_size = height * depth, b_size = parts * depth * width;  // floats of a stage
  static_assert(depth == 32 && width % 32 == 0 && b_size % (4 * threads) == 0);

  // Where B has the elements that tensor cores read: for 16 columns of C and 8 terms, four elements for each lane, those of
  // columns `lane / 4` and 8 later, and of two terms. The order of the terms in a sum is free, as is that of columns: a
  // lane sums four neighbours in 32 of them.
  struct Order {
    static EQ_FN Element element(int within, int) {
      const int n = within % 4, lane = within / 4 % 32, step = within / 128 % steps_of_stage;
      const int sixteen = within / 128 / steps_of_stage;
      return {step / 2 * 16 + lane % 4 * 4 + step % 2 * 2 + n / 2,
              sixteen / 2 * 32 + lane / 4 * 4 + sixteen % 2 * 2 + n % 2};
    }
  };

  // Thirty-two rows of a stage of A, eight for each multiplication.
  struct Rows {
    unsigned part[parts][4][steps_of_stage][2];
  };
  // Sixteen columns of a stage of B.
  struct Columns {
    unsigned part[parts][steps_of_stage][4];
  };

  const float *a, *packed;
  float* c;
  long long rows;
  int columns, terms, across, steps;
  float *a_stages, *b_stages;  // in shared memory
  int warp, lane;
  int tile, stride, total;  // `total`: stages of all tiles

  int load_tile = tile, load_step = 0, load_stage = 0, loaded = 0, step = 0, stage = 0;
  float sum[width / 16][4][4] = {};  // of 16 columns and 8 rows

  EQ_FN long long first_row(int tile) const { return (long long)(tile / across) * height + warp * warp_rows; }

  // Where a warp's row of a stage has four terms.
  static EQ_FN int place(int row, int four) { return row * depth + 4 * (four ^ row % 2 * 4); }

  EQ_FN void load() {
    if (loaded < total) {
      load_rows(a_stages + load_stage * a_size + warp * warp_rows * depth);
      const float* from = packed + ((long long)(load_tile % across) * steps + load_step) * b_size + 4 * threadIdx.x;
      float* to = b_stages + load_stage * b_size + 4 * threadIdx.x;
#pragma unroll
      for (int i = 0; i < b_size; i += 4 * threads) copy_or_clear(to + i, from + i, true);
      ++loaded;
      if (++load_step == steps) load_step = 0, load_tile += stride;
      if (++load_stage == stages) load_stage = 0;
    }
    commit_copies();
  }

  // Past the last row it is repeated.
  EQ_FN void load_rows(float* to) const {
    constexpr int fours = depth / 4, rows_at_once = 32 / fours;
    const int row = lane / fours, four = lane % fours, term = load_step * depth + 4 * four;
    const long long first = first_row(load_tile), last = rows - 1;
#pragma unroll
    for (int i = 0; i < warp_rows; i += rows_at_once)
      copy_or_clear(to + place(row + i, four), term < terms ? a + min(first + row + i, last) * terms + term : a,
                    term < terms);
  }

  EQ_FN void read(Rows& to) const {
    const float* from = a_stages + stage * a_size + warp * warp_rows * depth;
#pragma unroll
    for (int i = 0; i < 2 * steps_of_stage; ++i) {
      const int eight = i % 4, step = i / 4 * 2;
      const float4 read = *(const float4*)(from + place(8 * eight + lane / 4, 2 * step + lane % 4));
      const float four[4] = {read.x, read.y, read.z, read.w};
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        unsigned& head = to.part[0][eight][step + n / 2][n % 2];
        head = head_of(four[n]);
        if constexpr (parts == 2) to.part[1][eight][step + n / 2][n % 2] = tail_of(four[n], head);
      }
    }
  }

  EQ_FN void read(Columns& to, int sixteen) const {
    const float* from = b_stages + stage * b_size + sixteen * 16 * depth + 4 * lane;
#pragma unroll
    for (int i = 0; i < parts * steps_of_stage; ++i) {
      const int part = i / steps_of_stage, step = i % steps_of_stage;
      const uint4 four = *(const uint4*)(from + part * depth * width + step * 128);
      unsigned (&element)[4] = to.part[part][step];
      element[0] = four.x, element[1] = four.y, element[2] = four.z, element[3] = four.w;
    }
  }

  // Sixteen columns of a stage.
  EQ_FN void multiply(const Rows& a, int sixteen) {
    Columns b;
    read(b, sixteen);
    float made[4][4] = {};
    const auto add = [&](int of_a, int of_b, int step) {
#pragma unroll
      for (int eight = 0; eight < 4; ++eight)
        multiply_add(made[eight], b.part[of_b][step], a.part[of_a][eight][step], made[eight]);
    };
    if constexpr (parts == 2) {
#pragma unroll
      for (int step = 0; step < steps_of_stage; ++step) add(1, 0, step), add(0, 1, step);
    }
#pragma unroll
    for (int step = 0; step < steps_of_stage; ++step) add(0, 0, step);
#pragma unroll
    for (int i = 0; i < 16; ++i) sum[sixteen][i / 4][i % 4] += made[i / 4][i % 4];
  }

  EQ_FN void write() {
    const int column = tile % across * width + lane / 4 * 4;
    const bool aligned = columns % 4 == 0;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int eight = n / 2, odd = n % 2;
      const long long row = first_row(tile) + 8 * eight + lane % 4 * 2 + odd;
#pragma unroll
      for (int i = 0; i < width / 32; ++i) {
        const float *left = sum[2 * i][eight], *right = sum[2 * i + 1][eight];
        const float four[4] = {left[odd], left[2 + odd], right[odd], right[2 + odd]};
        write_four(c + row * columns + column + 32 * i, row < rows ? columns - column - 32 * i : 0, aligned, four);
      }
    }
#pragma unroll
    for (int i = 0; i < width; ++i) sum[i / 16][i / 4 % 4][i % 4] = 0;
  }

  EQ_FN void run() {
#pragma unroll
    for (int i = 0; i < stages - 1; ++i) load();
#pragma unroll 1
    for (int i = 0; i < total; ++i) {
      wait_copies<stages - 2>();
      __syncthreads();  // the stage has come for all, and all have done with the one that is overwritten next
      load();
      Rows now;
      read(now);
#pragma unroll
      for (int n = 0; n < width / 16; ++n) multiply(now, n);
      if (++stage == stages) stage = 0;
      if (++step < steps) continue;
      write();
      step = 0;
      tile += stride;
    }
  }
};

template <class P>
EQ_FN void mma_product(const float* a, const float* packed, float* c, long long rows, int columns, int terms) {
  using Work = MmaProduct<P>;
  extern __shared__ __align__(128) float shared_memory[];
  const int across = (columns + Work::width - 1) / Work::width, steps = (terms + P::depth - 1) / P::depth;
  const int tiles = (int)((rows + Work::height - 1) / Work::height) * across;
  const int first = (int)blockIdx.x, stride = (int)gridDim.x;
  const int total = first < tiles ? (tiles - first + stride - 1) / stride * steps : 0;
  float* const b_stages = shared_memory + P::stages * Work::a_size;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  wait_for_previous();
  Work{a, packed, c, rows, columns, terms, across, steps, shared_memory, b_stages, warp, lane, first, stride, total}
      .run();
}

}  // namespace

// csrc/runtime/matrix_product.cpp launches these, as those of `wgmma_product.h`, but with no rows to add.
#define EQ_EXPORT_MMA_PRODUCT(name, P)                                                                                 \
  EQ_KERNEL void __launch_bounds__(P::block_threads, P::resident)                                                      \
      name(const float* a, const float* packed, float* c, long long rows, int columns, int terms, const int2*) {       \
    mma_product<P>(a, packed, c, rows, columns, terms);                                                                \
  }

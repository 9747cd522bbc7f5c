// C = A B by mma.sync, which all GPUs of compute capability 8.0 and later have.
//
// Blocks go over tiles of C, neighbouring columns first. A warp has rows of its own and all columns of a tile, so it
// splits its rows in registers, once for each of these columns; B, which all warps of a block read, comes split. Of both
// factors, stages of `depth` terms are copied to shared memory ahead of their use. The sums of a stage are made for 16
// columns at a time, so that few of them are in the tensor cores' hands: four chains, which wait for each other less
// than a multiplication takes.
//
// What is multiplied are the transposes, so that all that lanes read at once is in the registers that multiplications take:
// of B a unit, which are terms of two of them, and of a row of A four terms of one. That is free of bank conflicts: a warp
// reads 512 bytes of B that lie together, and of A, at a time, 64 bytes of each of two rows.
//
// The body that follows has these numbers in a struct `P`.
#pragma once
#include "factors.h"

namespace {

template <class P>
struct MmaProduct {
  static constexpr int depth = P::depth, stages = P::stages, width = P::width, parts = P::parts;
  static constexpr int threads = P::block_threads, warp_rows = 32, height = threads / 32 * warp_rows;
  static constexpr int steps_of_stage = depth / 16;
  static constexpr int part_size = depth * width / 2, a_size = height * depth, b_size = parts * part_size;  // floats
  static_assert(depth == 32 && width % 32 == 0 && b_size % (4 * threads) == 0);

  // Units of B are, for 16 columns of C, those of column `lane / 4` of all lanes, then those of columns 8 later: four terms
  // for each of two multiplications. The order of the terms in a sum is free, as is that of columns: a lane sums four
  // neighbours in 32 of them.
  struct Order {
    static EQ_FN int term(int unit, int n) { return n / 4 * 16 + unit * 4 + n % 4; }
    static EQ_FN int place(int unit, int column, int) {
      const int sixteen = column / 32 * 2 + column % 4 / 2, eight = column % 2;
      return (sixteen * 2 + eight) * 32 + column % 32 / 4 * 4 + unit;
    }
  };

  // Thirty-two rows of a stage of A, eight for each multiplication, and what sums of rows are to be multiplied by: of
  // those that are neighbours in a lane's sums.
  struct Rows {
    unsigned part[parts][4][steps_of_stage][2];
    float scale[4][2];
  };
  // Sixteen columns of a stage of B.
  struct Columns {
    unsigned part[parts][steps_of_stage][4];
  };

  const float *a, *packed, *scales;
  float* c;
  long long rows;
  int columns, terms, across, steps;
  float *a_stages, *b_stages;  // in shared memory
  int warp, lane;
  int tile, stride, total;  // `total`: stages of all tiles

  int load_tile = tile, load_step = 0, load_stage = 0, loaded = 0, step = 0, stage = 0;
  float sum[width / 16][4][4] = {};  // of 16 columns and 8 rows

  EQ_FN long long first_row(int tile) const { return (long long)(tile / across) * height + warp * warp_rows; }

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
      copy_or_clear(to + place_of<depth>(row + i, four),
                    term < terms ? a + min(first + row + i, last) * terms + term : a, term < terms);
  }

  EQ_FN void read(Rows& to) const {
    const float* from = a_stages + stage * a_size + warp * warp_rows * depth;
#pragma unroll
    for (int eight = 0; eight < 4; ++eight) {
      float4 values[steps_of_stage];
      float largest = 0;
#pragma unroll
      for (int step = 0; step < steps_of_stage; ++step) {
        const float4 four = *(const float4*)(from + place_of<depth>(8 * eight + lane / 4, 4 * step + lane % 4));
        largest = fmaxf(largest, largest_of(four));
        values[step] = four;
      }
      const Scale scale = scale_of(largest_across(largest_across(largest, 1), 2));
#pragma unroll
      for (int n = 0; n < 2; ++n) to.scale[eight][n] = of_lane(scale.down, lane % 4 * 8 + 4 * n);
#pragma unroll
      for (int i = 0; i < 2 * steps_of_stage; ++i) {
        const float4 four = values[i / 2];
        const Split<parts> split(scale.up * (i % 2 ? four.z : four.x), scale.up * (i % 2 ? four.w : four.y));
#pragma unroll
        for (int n = 0; n < parts; ++n) to.part[n][eight][i / 2][i % 2] = split.part[n];
      }
    }
  }

  EQ_FN void read(Columns& to, int sixteen) const {
    const float* from = b_stages + stage * b_size + sixteen * 16 * depth / 2 + 4 * lane;
#pragma unroll
    for (int i = 0; i < 2 * parts; ++i) {
      const int part = i / 2, eight = i % 2;
      const uint4 unit = *(const uint4*)(from + part * part_size + eight * 128);
      const unsigned terms[4] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
      for (int n = 0; n < 4; ++n) to.part[part][n / 2][n % 2 * 2 + eight] = terms[n];
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
    for (int i = 0; i < 16; ++i) {
      float& of = sum[sixteen][i / 4][i % 4];
      of = fmaf(made[i / 4][i % 4], a.scale[i / 4][i % 2], of);
    }
  }

  EQ_FN void write() {
    const int column = tile % across * width + lane / 4 * 4;
    const bool aligned = columns % 4 == 0;
#pragma unroll
    for (int i = 0; i < width / 32; ++i) {
      const float4 scale = *(const float4*)(scales + column + 32 * i);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const int eight = n / 2, odd = n % 2;
        const long long row = first_row(tile) + 8 * eight + lane % 4 * 2 + odd;
        const float *left = sum[2 * i][eight], *right = sum[2 * i + 1][eight];
        const float four[4] = {left[odd], left[2 + odd], right[odd], right[2 + odd]};
        write_four(c + row * columns + column + 32 * i, row < rows ? columns - column - 32 * i : 0, aligned, four,
                   scale);
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
  const PackedB<P> b(columns, terms, Work::width);
  const int across = b.across, steps = b.steps;
  const int tiles = (int)((rows + Work::height - 1) / Work::height) * across;
  const int first = (int)blockIdx.x, stride = (int)gridDim.x;
  const int total = first < tiles ? (tiles - first + stride - 1) / stride * steps : 0;
  float* const b_stages = shared_memory + P::stages * Work::a_size;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  wait_for_previous();
  Work{a,      packed, packed + b.scales(), c,        rows, columns, terms,
       across, steps,  shared_memory,       b_stages, warp, lane,    first,
       stride, total}
      .run();
}

}  // namespace

// csrc/runtime/matrix_product.cpp launches these, as those of `wgmma_product.h`, but with no rows to add.
#define EQ_EXPORT_MMA_PRODUCT(name, P)                                                                                 \
  EQ_KERNEL void __launch_bounds__(P::block_threads, P::resident)                                                      \
      name(const float* a, const float* packed, float* c, long long rows, int columns, int terms, const int2*, int) {  \
    mma_product<P>(a, packed, c, rows, columns, terms);                                                                \
  }

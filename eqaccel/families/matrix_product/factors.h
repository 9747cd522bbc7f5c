// What both kernels of matrix products, C = A B, make of the factors.
//
// So that all that counts of a factor is among the halves that tensor cores multiply (halves.h), a row of A in each stage,
// and each column of B, are multiplied by a power of two, and sums are multiplied by its inverse. Where P::parts is 2, the
// sum of two halves stands for a float. Where it is 1, the head does, to within 2^-11 of it.
//
// Tensor cores cut sums off instead of rounding them, so they add no more than `depth` terms at a time, and the rest is
// added in float32. The small products come first: what is cut off is a part of the sum so far.
#pragma once
#include "halves.h"

namespace {

EQ_FN float largest_of(const float4& four) {
  return fmaxf(fmaxf(fabsf(four.x), fabsf(four.y)), fmaxf(fabsf(four.z), fabsf(four.w)));
}

// Where a row of a stage of A has four terms: no two lanes that read at once meet in a bank of shared memory.
template <int depth>
EQ_FN int place_of(int row, int four) {
  return row * depth + 4 * (four ^ row % 2 * 4);
}

// Writes four neighbours of a row of C, of which `left` columns are there.
EQ_FN void write_four(float* to, int left, bool aligned, const float (&four)[4], const float4& scale) {
  const float4 c = {four[0] * scale.x, four[1] * scale.y, four[2] * scale.z, four[3] * scale.w};
  if (aligned && left > 0) __stcs((float4*)to, c);
  if (!aligned && left > 0) *(float2*)to = make_float2(c.x, c.y);
  if (!aligned && left > 2) *(float2*)(to + 2) = make_float2(c.z, c.w);
}

// B as kernels read it: stages of depth x width, each heads and then tails if there are any, in units of eight terms of a
// column. `Order` says which terms these are, and where they lie. Behind the stages, what sums of each column are to be
// multiplied by.
template <class P>
struct PackedB {
  static constexpr int depth = P::depth, units_of_column = depth / 8, floats_of_unit = 4;
  int width, across, steps;

  EQ_FN PackedB(int columns, int terms, int width)
      : width(width), across((columns + width - 1) / width), steps((terms + depth - 1) / depth) {}

  EQ_FN int part_size() const { return units_of_column * width * floats_of_unit; }
  EQ_FN long long scales() const { return (long long)across * steps * P::parts * part_size(); }
};

// Packs B, element (k, n) at k row_stride + n column_stride, with zeros beyond its edges. blockDim.y columns are a block's,
// and blockDim.x threads, whole warps, have a column.
template <class P, class Order>
EQ_FN void pack(const float* b, float* packed, int columns, int terms, long long row_stride, long long column_stride,
                int width) {
  let_next_begin();
  extern __shared__ __align__(128) float shared_memory[];  // a number of each warp
  const PackedB<P> to(columns, terms, width);
  const int column = (int)(blockIdx.x * blockDim.y + threadIdx.y), units = to.steps * to.units_of_column;
  const int first = (int)threadIdx.x, step = (int)blockDim.x, warps = step / 32, first_warp = (int)threadIdx.y * warps;
  float values[8], largest = 0;
  const auto read = [&](int unit) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int k = unit / to.units_of_column * to.depth + Order::term(unit % to.units_of_column, n);
      values[n] = k < terms && column < columns ? b[k * row_stride + column * column_stride] : 0;
    }
  };
  for (int unit = first; unit < units; unit += step) {
    read(unit);
#pragma unroll
    for (int n = 0; n < 8; ++n) largest = fmaxf(largest, fabsf(values[n]));
  }
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) largest = largest_across(largest, mask);
  if (first % 32 == 0) shared_memory[first_warp + first / 32] = largest;
  __syncthreads();
  for (int n = 0; n < warps; ++n) largest = fmaxf(largest, shared_memory[first_warp + n]);
  if (column >= to.across * width) return;
  const Scale scale = scale_of(largest);
  if (first == 0) packed[to.scales() + column] = scale.down;
  for (int unit = first; unit < units; unit += step) {
    read(unit);
    unsigned part[P::parts][4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const Split<P::parts> split(values[2 * n] * scale.up, values[2 * n + 1] * scale.up);
#pragma unroll
      for (int i = 0; i < P::parts; ++i) part[i][n] = split.part[i];
    }
    const long long stage = (long long)(column / width) * to.steps + unit / to.units_of_column;
    const int place = Order::place(unit % to.units_of_column, column % width, width);
#pragma unroll
    for (int i = 0; i < P::parts; ++i)
      *(uint4*)(packed + (stage * P::parts + i) * to.part_size() + place * to.floats_of_unit) =
          make_uint4(part[i][0], part[i][1], part[i][2], part[i][3]);
  }
}

}  // namespace

// csrc/runtime/matrix_product.cpp launches this before the product, which may begin at once and waits for it.
#define EQ_EXPORT_PACK(P, Order)                                                                                       \
  EQ_KERNEL void eq_pack(const float* b, float* packed, int columns, int terms, long long row_stride,                  \
                         long long column_stride, int width) {                                                         \
    pack<P, Order>(b, packed, columns, terms, row_stride, column_stride, width);                                       \
  }

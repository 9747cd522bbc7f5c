// What both kernels of matrix products, C = A B, make of the factors.
//
// Tensor cores multiply numbers of 11 bits (TensorFloat-32). Where P::parts is 2, a float is the sum of two of them, head
// and tail, to within 2^-22 of itself, so head head + head tail + tail head is a product to within 2^-20. Where it is 1,
// the head stands for the float, to within 2^-11 of it.
//
// Tensor cores cut sums off instead of rounding them, so they add no more than `depth` terms at a time, and the rest is
// added in float32. The small products come first: what is cut off is a part of the sum so far.
#pragma once
#include "tensor_core.h"

namespace {

EQ_FN unsigned tail_of(float x, unsigned head) { return head_of(x - __uint_as_float(head)); }

// Writes four neighbours of a row of C, of which `left` columns are there.
EQ_FN void write_four(float* to, int left, bool aligned, const float (&four)[4]) {
  if (aligned && left > 0) *(float4*)to = make_float4(four[0], four[1], four[2], four[3]);
  if (!aligned && left > 0) *(float2*)to = make_float2(four[0], four[1]);
  if (!aligned && left > 2) *(float2*)(to + 2) = make_float2(four[2], four[3]);
}

// An element of a stage of B.
struct Element {
  int term, column;
};

// B, element (k, n) at k row_stride + n column_stride, as stages of depth x width: heads, then tails if there are any, in
// the order that `Order` gives. Zeros beyond its edges.
template <class P, class Order>
EQ_FN void pack(const float* b, float* packed, int columns, int terms, long long row_stride, long long column_stride,
                int width) {
  let_next_begin();
  constexpr int depth = P::depth;
  const int across = (columns + width - 1) / width, steps = (terms + depth - 1) / depth, size = depth * width;
  const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x, stage = i / size;
  if (stage >= (long long)across * steps) return;
  const int within = (int)(i % size);
  const Element e = Order::element(within, width);
  const long long k = stage % steps * depth + e.term;
  const long long n = stage / steps * width + e.column;
  const float value = k < terms && n < columns ? b[k * row_stride + n * column_stride] : 0;
  const unsigned head = head_of(value);
  float* to = packed + P::parts * size * stage + within;
  to[0] = __uint_as_float(head);
  if constexpr (P::parts == 2) to[size] = __uint_as_float(tail_of(value, head));
}

}  // namespace

// csrc/runtime/matrix_product.cpp launches this before the product, which may begin at once and waits for it.
#define EQ_EXPORT_PACK(P, Order)                                                                                       \
  EQ_KERNEL void eq_pack(const float* b, float* packed, int columns, int terms, long long row_stride,                  \
                         long long column_stride, int width) {                                                         \
    pack<P, Order>(b, packed, columns, terms, row_stride, column_stride, width);                                       \
  }

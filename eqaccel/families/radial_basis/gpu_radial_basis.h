// GPU prelude of radial basis functions: a thread computes those of an edge.
#pragma once
#include "abi.h"
#include "direction.h"
#include "gpu_elementary.h"
#include "machine.h"

namespace {

// Operands of an edge, or their outputs: z and gz share a place, dx and dw are tangents.
template <class P>
struct Row {
  V x[1], w[P::w_dim + 1], z[P::z_dim], dx[1], dw[P::w_dim + 1];  // no array is empty
};

template <int dim>
EQ_FN void read_row(const void* rows, int64_t offset, V* values) {
  constexpr int width = EQ_ROW_WIDTH(dim, sizeof(T));
  const T* from = static_cast<const T*>(rows) + offset;
#pragma unroll
  for (int n = 0; n < dim; n += width) {
    const LaneOf<width> part = *reinterpret_cast<const LaneOf<width>*>(from + n);
#pragma unroll
    for (int u = 0; u < width; ++u) values[n + u] = part.v[u];
  }
}
template <int dim>
EQ_FN void write_row(void* rows, int64_t row, const V* values) {
  constexpr int width = EQ_ROW_WIDTH(dim, sizeof(T));
  T* to = static_cast<T*>(rows) + row * dim;
#pragma unroll
  for (int n = 0; n < dim; n += width) {
    LaneOf<width> part;
#pragma unroll
    for (int u = 0; u < width; ++u) part.v[u] = values[n + u];
    *reinterpret_cast<LaneOf<width>*>(to + n) = part;
  }
}

}  // namespace

#include "radial_basis.h"

// csrc/runtime/row_kernel.cpp launches it.
#define EQ_EXPORT_ROWS(P)                                                                                              \
  EQ_KERNEL void eq_rows(const EQ_PARAMETER eq_operands o) {                                                           \
    const int64_t row = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;                                                \
    if (row >= o.num_edges) return;                                                                                    \
    constexpr int k = P::w_dim;                                                                                        \
    Row<P> in{}, out;                                                                                                  \
    read_row<1>(o.x, row, in.x);                                                                                       \
    if constexpr (k > 0) read_row<k>(o.w, row * o.w_stride, in.w);                                                     \
    if (has_gradient) read_row<P::z_dim>(o.gz, row * P::z_dim, in.z);                                                  \
    if (has_tangents) read_row<1>(o.a, row, in.dx);                                                                    \
    if constexpr (has_tangents && k > 0)                                                                               \
      if (o.c) read_row<k>(o.c, row * o.c_stride, in.dw);                                                              \
    run_row<P>(in, out);                                                                                               \
    if (writes_z) write_row<P::z_dim>(o.z, row, out.z);                                                                \
    if (has_gradient) write_row<1>(o.gx, row, out.x);                                                                  \
    if constexpr (has_gradient && k > 0)                                                                               \
      if (o.gw) write_row<k>(o.gw, row, out.w);                                                                        \
  }

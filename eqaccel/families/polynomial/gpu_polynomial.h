// GPU prelude of polynomials: a thread computes a row.
#pragma once
#include "abi.h"
#include "direction.h"
#include "gpu_lane.h"
#include "machine.h"

namespace {

typedef T V;

// Operands of a row, or its outputs: z and gz share a place, dx and dw are tangents.
template <class P>
struct Row {
  V x[P::x_dim], w[P::w_dim], z[P::z_dim], dx[P::x_dim], dw[P::w_dim];
};

template <int dim>
EQ_FN void read_row(const void* rows, int64_t row, V (&values)[dim]) {
  constexpr int width = EQ_ROW_WIDTH(dim, sizeof(T));
  const T* from = static_cast<const T*>(rows) + row * dim;
#pragma unroll
  for (int n = 0; n < dim; n += width) {
    const LaneOf<width> part = *reinterpret_cast<const LaneOf<width>*>(from + n);
#pragma unroll
    for (int u = 0; u < width; ++u) values[n + u] = part.v[u];
  }
}
template <int dim>
EQ_FN void write_row(void* rows, int64_t row, const V (&values)[dim]) {
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

// csrc/runtime/row_kernel.cpp launches it.
#define EQ_EXPORT_ROWS(P)                                                                                              \
  EQ_KERNEL void eq_rows(const EQ_PARAMETER eq_operands o) {                                                           \
    const int64_t row = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;                                                \
    if (row >= o.num_edges) return;                                                                                    \
    Row<P> in, out;                                                                                                    \
    read_row(o.x, row, in.x);                                                                                          \
    read_row(o.w, row, in.w);                                                                                          \
    if (has_gradient) read_row(o.gz, row, in.z);                                                                       \
    if (has_tangents) read_row(o.a, row, in.dx);                                                                       \
    if (has_tangents) read_row(o.c, row, in.dw);                                                                       \
    run_row(in, out);                                                                                                  \
    if (writes_z) write_row(o.z, row, out.z);                                                                          \
    if (has_gradient) write_row(o.gx, row, out.x);                                                                     \
    if (has_gradient) write_row(o.gw, row, out.w);                                                                     \
  }

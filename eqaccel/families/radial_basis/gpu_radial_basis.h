// GPU prelude of radial basis functions: a thread computes those of an edge.
#pragma once
#include "abi.h"
#include "direction.h"
#include "gpu_batch.h"
#include "gpu_elementary.h"
#include "machine.h"

namespace {

// Operands of an edge, or their outputs: z and gz share a place, dx and dw are tangents.
template <class P>
struct Row {
  V x[1], w[P::w_dim + 1], z[P::z_dim], dx[1], dw[P::w_dim + 1];  // no array is empty
};

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
    if (writes_z) write_row<P::z_dim>(o.z, row * P::z_dim, out.z);                                                     \
    if (has_gradient) write_row<1>(o.gx, row, out.x);                                                                  \
    if constexpr (has_gradient && k > 0)                                                                               \
      if (o.gw) write_row<k>(o.gw, row * k, out.w);                                                                    \
  }

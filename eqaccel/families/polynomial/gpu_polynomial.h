// GPU prelude of polynomials: a thread computes a row.
#pragma once
#include "abi.h"
#include "direction.h"
#include "gpu_batch.h"
#include "machine.h"

namespace {

typedef T V;

// Operands of a row, or its outputs: z and gz share a place, dx and dw are tangents.
template <class P>
struct Row {
  V x[P::x_dim], w[P::w_dim], z[P::z_dim], dx[P::x_dim], dw[P::w_dim];
};

}  // namespace

// csrc/runtime/row_kernel.cpp launches it.
#define EQ_EXPORT_ROWS(P)                                                                                              \
  EQ_KERNEL void eq_rows(const EQ_PARAMETER eq_operands o) {                                                           \
    const int64_t row = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;                                                \
    if (row >= o.num_edges) return;                                                                                    \
    Row<P> in{}, out;                                                                                                  \
    read_row<P::x_dim>(o.x, row * P::x_dim, in.x);                                                                     \
    read_row<P::w_dim>(o.w, row * P::w_dim, in.w);                                                                     \
    if (has_gradient) read_row<P::z_dim>(o.gz, row * P::z_dim, in.z);                                                  \
    if (has_tangents) read_row<P::x_dim>(o.a, row * P::x_dim, in.dx);                                                  \
    if (has_tangents && o.c) read_row<P::w_dim>(o.c, row * P::w_dim, in.dw);                                           \
    run_row(in, out);                                                                                                  \
    if (writes_z) write_row<P::z_dim>(o.z, row * P::z_dim, out.z);                                                     \
    if (has_gradient) write_row<P::x_dim>(o.gx, row * P::x_dim, out.x);                                                \
    if (has_gradient) write_row<P::w_dim>(o.gw, row * P::w_dim, out.w);                                                \
  }

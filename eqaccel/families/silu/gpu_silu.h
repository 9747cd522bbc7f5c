// GPU prelude of activations: a thread computes four elements of the `num_receivers`, and `num_edges` threads all.
#pragma once
#include "abi.h"
#include "direction.h"
#include "gpu_elementary.h"
#include "machine.h"

namespace {

constexpr int width = 4;
typedef LaneOf<16 / sizeof(T)> Part;  // what a thread moves at a time

// Elements past the last one are zero.
EQ_FN void read_elements(const void* from, int64_t first, int64_t left, V (&values)[width]) {
  const T* p = static_cast<const T*>(from) + first;
  constexpr int step = sizeof(Part) / sizeof(T);
#pragma unroll
  for (int n = 0; n < width; n += step) {
    if (left >= width) {
      const Part part = *reinterpret_cast<const Part*>(p + n);
#pragma unroll
      for (int u = 0; u < step; ++u) values[n + u] = part.v[u];
    } else {
#pragma unroll
      for (int u = n; u < n + step; ++u) values[u] = u < left ? p[u] : T(0);
    }
  }
}
EQ_FN void write_elements(void* to, int64_t first, int64_t left, const V (&values)[width]) {
  T* p = static_cast<T*>(to) + first;
  constexpr int step = sizeof(Part) / sizeof(T);
#pragma unroll
  for (int n = 0; n < width; n += step) {
    if (left >= width) {
      Part part;
#pragma unroll
      for (int u = 0; u < step; ++u) part.v[u] = values[n + u];
      *reinterpret_cast<Part*>(p + n) = part;
    } else {
#pragma unroll
      for (int u = n; u < n + step; ++u)
        if (u < left) p[u] = values[u];
    }
  }
}

}  // namespace

#include "silu.h"

// csrc/runtime/row_kernel.cpp launches it.
#define EQ_EXPORT_ELEMENTS(P)                                                                                          \
  EQ_KERNEL void eq_rows(const EQ_PARAMETER eq_operands o) {                                                           \
    const int64_t first = (blockIdx.x * int64_t(blockDim.x) + threadIdx.x) * width, left = o.num_receivers - first;    \
    if (left <= 0) return;                                                                                             \
    V x[width], gz[width] = {}, a[width] = {}, z[width], gx[width];                                                    \
    read_elements(o.x, first, left, x);                                                                                \
    if (has_gradient) read_elements(o.gz, first, left, gz);                                                            \
    if (has_tangents) read_elements(o.a, first, left, a);                                                              \
    _Pragma("unroll") for (int u = 0; u < width; ++u) run_element<P>(x[u], gz[u], a[u], z[u], gx[u]);                  \
    if (writes_z) write_elements(o.z, first, left, z);                                                                 \
    if (has_gradient) write_elements(o.gx, first, left, gx);                                                           \
  }

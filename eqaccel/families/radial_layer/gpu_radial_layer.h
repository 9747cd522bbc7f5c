// GPU prelude of radial layers: a few threads share a row, with four columns of z each or a multiple of that. They keep
// their weights in registers and go through some rows. There are `num_edges` threads.
#pragma once
#include "abi.h"
#include "direction.h"
#include "gpu_batch.h"
#include "gpu_elementary.h"
#include "gpu_lane_sums.h"
#include "machine.h"
#include "activations.h"

namespace {

constexpr int width = 4;  // columns that a thread reads and writes at a time
typedef LaneOf<width> Columns;

template <class P>
struct LayerWorker {
  static constexpr int lanes_of_row = P::lanes_of_row, step = lanes_of_row * width;
  static constexpr int parts = (P::outputs + step - 1) / step;
  static constexpr int sums = power_of_two(P::inputs), each = sums > lanes_of_row ? sums / lanes_of_row : 1;
  static constexpr int lanes_of_sum = lanes_of_row > sums ? lanes_of_row / sums : 1;
  Columns weights[P::inputs][parts];
  int lane;

  EQ_FN int column(int part) const { return part * step + lane * width; }
  EQ_FN LayerWorker(const void* w, int lane_) : lane(lane_) {
#pragma unroll
    for (int k = 0; k < P::inputs; ++k)
#pragma unroll
      for (int part = 0; part < parts; ++part)
        weights[k][part] =
            load<width>(static_cast<const T*>(w) + k * P::outputs + column(part), column(part) < P::outputs);
  }

  EQ_FN void run(const eq_operands& o, int64_t row, bool writes) const {
    T x[P::inputs];
    read_row<P::inputs>(o.x, row * P::inputs, x);
    T gx[sums];
#pragma unroll
    for (int k = 0; k < sums; ++k) gx[k] = 0;
#pragma unroll
    for (int part = 0; part < parts; ++part) {
      const bool active = column(part) < P::outputs;
      const int64_t at = row * P::outputs + column(part);
      Columns gz, z;
      if (has_gradient) gz = load<width>(static_cast<const T*>(o.gz) + at, active);
#pragma unroll
      for (int u = 0; u < width; ++u) {
        T sum = 0;
#pragma unroll
        for (int k = 0; k < P::inputs; ++k) sum += x[k] * weights[k][part].v[u];
        const Curve f = silu_curve(T(P::scale) * sum);
        if constexpr (!has_gradient) z.v[u] = T(P::factor) * f.value;
        else gz.v[u] *= T(P::factor * P::scale) * f.slope;
      }
      if constexpr (has_gradient) {
#pragma unroll
        for (int k = 0; k < P::inputs; ++k)
#pragma unroll
          for (int u = 0; u < width; ++u) gx[k] += gz.v[u] * weights[k][part].v[u];
      } else if (active && writes) {
        *reinterpret_cast<Columns*>(static_cast<T*>(o.z) + at) = z;
      }
    }
    if constexpr (has_gradient) {
      add_over_lanes<sums, lanes_of_row / 2>(gx, lane);
      if (!writes || lane % lanes_of_sum != 0) return;
#pragma unroll
      for (int q = 0; q < each; ++q) {
        const int k = lane / lanes_of_sum * each + q;
        if (k < P::inputs) static_cast<T*>(o.gx)[row * P::inputs + k] = gx[q];
      }
    }
  }
};

template <class P>
EQ_FN void run_layer(const eq_operands& o, int64_t thread) {
  const LayerWorker<P> worker(o.w, int(thread % P::lanes_of_row));
  const int64_t first = thread / P::lanes_of_row * P::rows_of_thread;
  // All lanes of a warp take part in sums, whether their rows exist or not.
#pragma unroll 2
  for (int n = 0; n < P::rows_of_thread; ++n) {
    const int64_t row = first + n, last = o.num_receivers - 1;
    worker.run(o, row < last ? row : last, row <= last);
  }
}

}  // namespace

// csrc/runtime/row_kernel.cpp launches it.
#define EQ_EXPORT_LAYER(P)                                                                                             \
  EQ_KERNEL void eq_rows(const EQ_PARAMETER eq_operands o) {                                                           \
    run_layer<P>(o, blockIdx.x * int64_t(blockDim.x) + threadIdx.x);                                                   \
  }

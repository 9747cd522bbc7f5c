// GPU: rows of a batch, each of which a thread holds.
#pragma once
#include "abi.h"
#include "gpu_lane.h"
#include "machine.h"

namespace {

// A row of `dim` elements that begins `offset` elements behind the first row.
template <int dim>
EQ_FN void read_row(const void* rows, int64_t offset, T* values) {
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
EQ_FN void write_row(void* rows, int64_t offset, const T* values) {
  constexpr int width = EQ_ROW_WIDTH(dim, sizeof(T));
  T* to = static_cast<T*>(rows) + offset;
#pragma unroll
  for (int n = 0; n < dim; n += width) {
    LaneOf<width> part;
#pragma unroll
    for (int u = 0; u < width; ++u) part.v[u] = values[n + u];
    *reinterpret_cast<LaneOf<width>*>(to + n) = part;
  }
}

}  // namespace

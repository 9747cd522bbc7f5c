// GPU prelude: kernels that move and add whole rows, around the main one.
#pragma once
#include "abi.h"
#include "gpu_lane.h"
#include "gpu_work_split.h"
#include "machine.h"

namespace {

EQ_FN constexpr int row_width(int dim) { return EQ_ROW_WIDTH(dim, sizeof(T)); }

// Where elements n, n + 1, ... of a row in one layout lie in the other: (2l+1, mul) and (mul, 2l+1) inside a block of
// irreps. They are looked for together: a row may have dozens of blocks.
template <int width>
struct OtherLayout {
  int n, (&positions)[width];
  bool is_mul_ir;  // the layout that n counts in
  EQ_FN void operator()(int offset, int mul, int dim) const {
    const int inner = is_mul_ir ? dim : mul, outer = is_mul_ir ? mul : dim;
    if (n + width <= offset || n >= offset + mul * dim) return;
#pragma unroll
    for (int u = 0; u < width; ++u) {
      const int local = n + u - offset;
      if (local >= 0 && local < mul * dim) positions[u] = offset + local % inner * outer + local / inner;
    }
  }
};
template <class P, int width>
EQ_FN void find_positions(int n, bool is_x, bool is_mul_ir, int (&positions)[width]) {
#pragma unroll
  for (int u = 0; u < width; ++u) positions[u] = n + u;
  if (is_x) P::each_x_block(OtherLayout<width>{n, positions, is_mul_ir});
  else P::each_z_block(OtherLayout<width>{n, positions, is_mul_ir});
}
// Where column n of x, in the layout (2l+1, mul), is to be written; kernels that take both layouts leave it in place.
template <class P>
EQ_FN int x_position(int n, bool to_mul_ir) {
  int position[1] = {n};
  if constexpr (!P::takes_both_layouts) {
    if (to_mul_ir) find_positions<P>(n, true, false, position);
  }
  return position[0];
}

// Each thread moves a few elements of many rows, two of which are on their way at a time: writes are contiguous, reads
// meet in the first-level cache.
template <class P, bool is_x>
EQ_FN void relayout(const T* from, T* to, int64_t rows, bool to_mul_ir) {
  constexpr int dim = is_x ? P::x_dim : P::z_dim, width = row_width(dim), ahead = 2;
  const int n = (blockIdx.y * blockDim.x + threadIdx.x) * width;
  if (n >= dim) return;
  int other[width];
  find_positions<P>(n, is_x, to_mul_ir, other);
  const int64_t step = gridDim.x;
#pragma unroll 1
  for (int64_t row = blockIdx.x; row < rows; row += ahead * step) {
    LaneOf<width> moved[ahead];
#pragma unroll
    for (int k = 0; k < ahead; ++k) {
      const T* const values = from + (row + k * step < rows ? row + k * step : row) * dim;
#pragma unroll
      for (int u = 0; u < width; ++u) moved[k].v[u] = values[other[u]];
    }
#pragma unroll
    for (int k = 0; k < ahead; ++k)
      if (row + k * step < rows) *reinterpret_cast<LaneOf<width>*>(to + (row + k * step) * dim + n) = moved[k];
  }
}

// Adds the per-edge gradients of each sender in the order of its slots, to what earlier launches left if there were any.
// There are none of columns that no path reads.
template <class P>
EQ_FN void gather_gx(const eq_operands& o, const eq_work_split& split) {
  constexpr int width = row_width(P::x_dim);
  let_next_begin();
  const Rows senders = senders_of(o);
  const BlockRange range(senders, split, blockIdx.x, 0, senders.slots, /*sums=*/true);
  wait_for_previous();
  if (!range.exists) return;
  const int column = (blockIdx.y * blockDim.x + threadIdx.x) * width;
  bool reads[width], reads_any = false;
#pragma unroll
  for (int u = 0; u < width; ++u) reads_any |= reads[u] = P::reads_x(column + u);
  const bool active = column < P::x_dim, adds = split.first > 0, partly = adds || split.last < range.rows.slots;
  const T* from = static_cast<const T*>(o.workspace) - int64_t(split.first) * P::x_dim + (active ? column : 0);
  int t = range.first;
  for (int row = range.row; t < range.last || row == range.row; ++row) {
    const int row_end = min(range.rows.end(row), range.last);
    if (partly) t = search(o.t_slot, t, row_end, split.first);
    const int end = partly ? search(o.t_slot, t, row_end, split.last) : row_end;
    const bool writes = active && (!adds || t < end);
    const auto of_slot = [&](int n) { return load<width>(from + int64_t(o.t_slot[t + n]) * P::x_dim, true); };
    const LaneOf<width> total = add_up(LaneOf<width>{}, reads_any ? end - t : 0, of_slot);
    t = row_end;
    if (!writes) continue;
    T* const gx = static_cast<T*>(o.gx) + int64_t(row) * P::x_dim;
    T* const to = range.target(split, static_cast<T*>(o.gx), row, P::x_dim);
    const bool moves = o.mul_ir && to == gx;
#pragma unroll
    for (int u = 0; u < width; ++u) {
      T& sum = to[x_position<P>(column + u, moves)];
      const T value = reads[u] ? total.v[u] : T(0);
      sum = adds ? sum + value : value;
    }
  }
}

template <class P>
EQ_FN void add_receiver_partials(const eq_operands& o, const eq_work_split& split) {
  add_partials(receivers_of(o), split, static_cast<T*>(o.z), P::z_dim, [](int n) { return n; });
}
template <class P>
EQ_FN void add_sender_partials(const eq_operands& o, const eq_work_split& split) {
  add_partials(senders_of(o), split, static_cast<T*>(o.gx), P::x_dim,
               [&](int n) { return x_position<P>(n, o.mul_ir); });
}

}  // namespace

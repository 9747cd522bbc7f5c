// GPU prelude: kernels that add whole rows, after the main one.
#pragma once
#include "abi.h"
#include "gpu_lane.h"
#include "gpu_work_split.h"
#include "machine.h"

namespace {

EQ_FN constexpr int row_width(int dim) { return EQ_ROW_WIDTH(dim, sizeof(T)); }

// Where element n of a row of x in the layout (2l+1, mul) lies in the layout (mul, 2l+1).
struct MulIrPlace {
  int n, &place;
  EQ_FN void operator()(int offset, int mul, int dim) const {
    const int local = n - offset;
    if (local >= 0 && local < mul * dim) place = offset + local % mul * dim + local / mul;
  }
};
// Where column n of gradients of slots is to be written.
template <class P>
EQ_FN int gx_place(int n) {
  int place = n;
  if constexpr (P::moves_gx) P::each_x_block(MulIrPlace{n, place});
  return place;
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
#pragma unroll
    for (int u = 0; u < width; ++u) {
      T& sum = to[to == gx ? gx_place<P>(column + u) : column + u];
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
  add_partials(senders_of(o), split, static_cast<T*>(o.gx), P::x_dim, [](int n) { return gx_place<P>(n); });
}

}  // namespace

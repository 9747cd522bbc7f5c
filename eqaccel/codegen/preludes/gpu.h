// GPU prelude: a lane is a thread that owns a few channels, a block owns a range of the edges, sorted by receiver.
//
// Warps share a block's work as (segment, chunk of channels); the warps of a group have both in common and take turns at
// the edges. Rows of x and w reach shared memory some stages ahead; the edge matrices of the next stage are built by all
// threads while this one is computed; outputs stay in registers until the receiver's last edge. Everything is added in a
// fixed order where `deterministic` asks for it.
#pragma once
#include "abi.h"
#include "direction.h"
#include "gpu_lane.h"
#include "gpu_pipeline.h"
#include "gpu_rows.h"
#include "gpu_work_split.h"
#include "machine.h"

namespace {

// Channels of this thread inside the blocks of a segment.
template <class S>
struct Channels {
  static constexpr int n = S::lane_channels;
  int first;
  bool active;  // false past the last channel
  EQ_FN Channels(int warp_of_segment, int lane)
      : first((warp_of_segment * 32 + lane) * n), active(S::mul % (32 * n) == 0 || first < S::mul) {}
};

// ---- what a segment's edge() reads and writes

template <int n, class Element>
struct SharedRow {
  const Element* row;
  bool active;
  EQ_FN LaneOf<n> at(int staged, int) const { return load<n>(row + staged, active); }
};

template <int n, int d1, int mul, bool adds>
struct XBlock {
  LaneOf<n> x_value[d1], a_value[d1], gx[d1];
  T* gx_row;
  bool active, deterministic;
  EQ_FN LaneOf<n> x(int i, int) const { return x_value[i]; }
  EQ_FN LaneOf<n> a(int i, int) const { return a_value[i]; }
  EQ_FN void add(int i, int, LaneOf<n> value) { gx[i] = gx[i] + value; }
  EQ_FN void flush() const {
    if (!active) return;
#pragma unroll
    for (int i = 0; i < d1; ++i) {
      T* const to = gx_row + i * mul;
      if (!deterministic) atomic_add(to, gx[i].v);
      else stream_store(to, (adds ? gx[i] + load<n>(to, true) : gx[i]).v);
    }
  }
};
template <int n>
struct Weight {
  LaneOf<n> w, c, gw;
  T* gw_row;
  bool active;
  EQ_FN LaneOf<n> at(int) const { return w; }
  EQ_FN LaneOf<n> tangent(int) const { return c; }
  template <bool first, bool>
  EQ_FN void add(int, LaneOf<n> value) {
    gw = first ? value : gw + value;
  }
  EQ_FN void flush() const {
    if (active) stream_store(gw_row, gw.v);
  }
};
template <class S>
struct EdgeRows {
  static constexpr int n = S::lane_channels;
  // Shared memory, at this lane's first channel.
  const T* x_row;
  const W* w_row;
  const T *a_row, *c_row;
  T *gx_row, *gw_row;  // device memory, likewise
  bool active, deterministic;
  LaneOf<n>*gz, *ggz;  // registers
  template <int d1, int mul, bool adds>
  EQ_FN XBlock<n, d1, mul, adds> x_block(int staged, int offset) const {
    XBlock<n, d1, mul, adds> block;
#pragma unroll
    for (int i = 0; i < d1; ++i) {
      block.x_value[i] = load<n>(x_row + staged + i * mul, active);
      if (has_tangents) block.a_value[i] = load<n>(a_row + staged + i * mul, active);
      block.gx[i] = load<n>(static_cast<const T*>(nullptr), false);
    }
    block.gx_row = gx_row + offset;
    block.active = active;
    block.deterministic = deterministic;
    return block;
  }
  template <int mul>
  EQ_FN Weight<n> weight(int staged, int offset) const {
    Weight<n> weight;
    weight.w = load<n>(w_row + staged, active);
    if (has_tangents) weight.c = load<n>(c_row + staged, active);
    weight.gw_row = gw_row + offset;
    weight.active = active;
    return weight;
  }
  template <int mul>
  EQ_FN LaneOf<n> g(int component, int, int) const {
    return gz[component];
  }
  template <int mul>
  EQ_FN LaneOf<n> z(int component, int, int) const {
    return ggz[component];
  }
  template <int mul>
  EQ_FN void set_z(int component, int, int, LaneOf<n> value) const {
    ggz[component] = value;
  }
};

// Adds v[0..n) over the lanes of a warp, leaving sum q in the lanes that ask for it: half the values change lanes at
// each level, so that 16 sums take 16 shuffles and not 80.
template <int n, int offset>
EQ_FN void add_over_lanes(T* v, int lane) {
  if constexpr (offset > 0) {
    constexpr int half = n / 2;
    if constexpr (n > 1) {
      const bool upper = lane & offset;
#pragma unroll
      for (int q = 0; q < half; ++q) {
        const T give = upper ? v[q] : v[q + half], keep = upper ? v[q + half] : v[q];
        v[q] = keep + shuffle_xor(give, offset);
      }
      add_over_lanes<half, offset / 2>(v, lane);
    } else {
      v[0] += shuffle_xor(v[0], offset);
      add_over_lanes<1, offset / 2>(v, lane);
    }
  }
}
EQ_FN constexpr int power_of_two(int value) { return value <= 1 ? 1 : 2 * power_of_two((value + 1) / 2); }
EQ_FN constexpr int log2_of(int value) { return value <= 1 ? 0 : 1 + log2_of(value / 2); }

template <class P, class S>
struct Worker {
  typedef Layout<P> L;
  static constexpr int n = S::lane_channels;
  Pipeline<P>& pipe;
  const eq_operands& o;
  const eq_work_split& split;
  const BlockRange& range;
  // Warps of a group own the same channels; each takes every S::warps_per_group-th edge of a stage.
  const int group, group_warp;
  T* const sums;  // shared memory in which the group adds up its outputs
  const Channels<S> channels;
  LaneOf<n> z[writes_z ? S::outputs : 1];
  LaneOf<n> g[has_gradient ? S::outputs : 1];

  EQ_FN Worker(Pipeline<P>& pipe_, const eq_work_split& split_, const BlockRange& range_, int first_group, int warp,
               T* sums_)
      : pipe(pipe_), o(pipe_.o), split(split_), range(range_), group(first_group + warp / S::warps_per_group),
        group_warp(warp % S::warps_per_group), sums(sums_ + warp / S::warps_per_group * S::sums),
        channels(warp / S::warps_per_group, pipe_.lane) {}

  EQ_FN void begin(int receiver) {
    const T* const gz = static_cast<const T*>(o.gz) + int64_t(receiver) * P::z_dim + channels.first;
#pragma unroll
    for (int k = 0; k < S::outputs; ++k) {
      if (writes_z) z[k] = load<n>(static_cast<const T*>(nullptr), false);
      if (has_gradient) g[k] = load<n>(gz + S::z_offset(k), channels.active);
    }
  }

  EQ_FN void finish(int receiver) {
    if (!writes_z) return;
    T* const row = range.target(split, static_cast<T*>(o.z), receiver, P::z_dim) + channels.first;
    if constexpr (S::warps_per_group == 1) {
      if (P::sums > 0 && !EQ_WARP_BARRIERS) wait_for_group();
      if (channels.active) {
#pragma unroll
        for (int k = 0; k < S::outputs; ++k) stream_store(row + S::z_offset(k), z[k].v);
      }
      if (P::sums > 0 && !EQ_WARP_BARRIERS) wait_for_group();
    } else {
      LaneOf<n>* const of_lane = reinterpret_cast<LaneOf<n>*>(sums) + pipe.lane;
#pragma unroll
      for (int k = 0; k < S::outputs; ++k) of_lane[(group_warp * S::outputs + k) * 32] = z[k];
      wait_for_group();
#pragma unroll 1
      for (int k = group_warp; k < S::outputs; k += S::warps_per_group) {
        LaneOf<n> total = of_lane[k * 32];
#pragma unroll
        for (int of = 1; of < S::warps_per_group; ++of) total = total + of_lane[(of * S::outputs + k) * 32];
        if (channels.active) stream_store(row + S::z_offset_at(k), total.v);
      }
      wait_for_group();
    }
  }
  EQ_FN void wait_for_group() const {
    static_assert(S::warps_per_group == 1 || P::warp_groups < 16, "each group has a barrier");
    wait_for_warps(1 + group, S::warps_per_group);
  }

  // At this lane's first channel, where its row of x is.
  EQ_FN const W* weights_of(const T* x_row) const {
    if constexpr (sizeof(W) == sizeof(T)) return reinterpret_cast<const W*>(x_row + L::x_row);
    else return reinterpret_cast<const W*>(x_row - channels.first + L::x_row) + channels.first;
  }
  EQ_FN void run_edge(int step, int e) {
    const T* rows = pipe.rows(step, e) + channels.first;
    const W* weights = weights_of(rows);
    const T* entries = pipe.entries(step, e);
    if constexpr (!has_gradient) {
      S::edge(SharedRow<n, T>{rows, channels.active}, SharedRow<n, W>{weights, channels.active}, entries, z);
    } else {
      constexpr int components = power_of_two(P::y_dim);
      Sum gy[components];
#pragma unroll
      for (int j = 0; j < components; ++j) gy[j] = 0;
      const int2 id = pipe.id(step, e);
      const int64_t gx_row = o.deterministic ? pipe.slot(step, e) - split.first : id.y, gw_row = pipe.edge(step, e);
      T* gx = static_cast<T*>(o.row_ptr && o.deterministic ? o.workspace : o.gx);
      const T* tangent_rows = rows + L::edge / 2;
      EdgeRows<S> operands{rows,
                           weights,
                           tangent_rows,
                           tangent_rows + L::x_row,
                           gx + gx_row * P::x_dim + channels.first,
                           static_cast<T*>(o.gw) + gw_row * P::w_dim + channels.first,
                           channels.active,
                           o.deterministic != 0,
                           g,
                           z};
      S::edge(operands, entries, entries + P::entries, gy);
      add_over_lanes<components, 16>(gy, pipe.lane);
      constexpr int shift = 5 - log2_of(components < 32 ? components : 32),
                    each = components < 32 ? 1 : components / 32;
      T* to = pipe.shared + L::gy + (step & 1) * L::gy_stage + (e * P::warp_groups + group) * P::y_dim;
      if ((pipe.lane & ((1 << shift) - 1)) == 0) {
#pragma unroll
        for (int q = 0; q < each; ++q) {
          const int j = (pipe.lane >> shift) * each + q;
          if (j < P::y_dim) to[j] = gy[q];
        }
      }
    }
  }

  // Gradients of y of a finished stage: the shares of the warp groups, in order.
  EQ_FN void write_attribute_gradients(int step) const {
    if (!has_gradient || step < 0 || step >= pipe.steps) return;
    const T* from = pipe.shared + L::gy + (step & 1) * L::gy_stage;
    for (int t = pipe.thread; t < pipe.count(step) * P::y_dim; t += L::threads) {
      const int e = t / P::y_dim, j = t - e * P::y_dim;
      T total = 0;
#pragma unroll
      for (int of = 0; of < P::warp_groups; ++of) total += from[(e * P::warp_groups + of) * P::y_dim + j];
      T& gradient = static_cast<T*>(o.gy)[int64_t(pipe.edge(step, e)) * P::y_dim + j];
      gradient = P::adds ? gradient + total : total;
    }
  }

  // Every warp of a group sees every edge, so that all of them finish a row in the same stage.
  EQ_FN void run() {
    int receiver = range.row, end = range.rows.end(receiver);
    begin(receiver);
#pragma unroll 1
    for (int step = 0; step < pipe.steps; ++step) {
      pipe.advance(step);
      write_attribute_gradients(step - 1);
#pragma unroll 1
      for (int e = 0; e < L::edges; ++e) {
        const int slot = pipe.slot(step, e);
        if (slot >= pipe.last) break;
        while (slot >= end) {
          finish(receiver++);
          end = range.rows.end(receiver);
          begin(receiver);
        }
        if (S::warps_per_group == 1 || e % S::warps_per_group == group_warp) run_edge(step, e);
      }
    }
    if (has_gradient) {
      pipe.wait_for_block();
      write_attribute_gradients(pipe.steps - 1);
    }
    finish(receiver);
  }
};

template <class P>
EQ_FN void run_block(const eq_operands& o, const eq_work_split& split, T* shared) {
  let_next_begin();
  const BlockRange range(receivers_of(o), split, blockIdx.x, split.first, split.last);
  if (!range.exists) return;
  Pipeline<P> pipe(o, split, shared, range.first, range.last);
  T* sums = shared + Layout<P>::sums;
  int warps = 0, warp_groups = 0;
  P::each_segment([&](auto segment) {
    typedef decltype(segment) S;
    if (pipe.warp >= warps && pipe.warp < warps + S::warp_groups * S::warps_per_group) {
      Worker<P, S> worker(pipe, split, range, warp_groups, pipe.warp - warps, sums);
      worker.run();
    }
    warps += S::warp_groups * S::warps_per_group;
    warp_groups += S::warp_groups;
    sums += S::warp_groups * S::sums;
  });
}

}  // namespace

// The kernels of a translation unit; csrc/runtime/gpu_kernel.cpp launches them.
#define EQ_EXPORT_MAIN(name, P)                                                                                        \
  EQ_KERNEL void __launch_bounds__(Layout<P>::threads, EQ_RESIDENT(P::blocks_per_sm))                                  \
      name(const EQ_PARAMETER eq_operands o, const EQ_PARAMETER eq_work_split split) {                                 \
    static_assert(Layout<P>::bytes == P::shared_bytes, "the plan and the layout count shared memory alike");           \
    extern __shared__ __align__(128) unsigned char shared[];                                                           \
    run_block<P>(o, split, reinterpret_cast<T*>(shared));                                                              \
  }
#define EQ_EXPORT(P)                                                                                                   \
  EQ_KERNEL void eq_add_partials(const EQ_PARAMETER eq_operands o, const EQ_PARAMETER eq_work_split split) {           \
    add_receiver_partials<P>(o, split);                                                                                \
  }                                                                                                                    \
  EQ_KERNEL void __launch_bounds__(128, 8)                                                                             \
      eq_gather_gx(const EQ_PARAMETER eq_operands o, const EQ_PARAMETER eq_work_split split) {                         \
    gather_gx<P>(o, split);                                                                                            \
  }                                                                                                                    \
  EQ_KERNEL void eq_add_gx_partials(const EQ_PARAMETER eq_operands o, const EQ_PARAMETER eq_work_split split) {        \
    add_sender_partials<P>(o, split);                                                                                  \
  }                                                                                                                    \
  EQ_KERNEL void eq_relayout(const T* from, T* to, int64_t rows, int is_x, int to_mul_ir) {                            \
    if (is_x) relayout<P, true>(from, to, rows, to_mul_ir);                                                            \
    else relayout<P, false>(from, to, rows, to_mul_ir);                                                                \
  }

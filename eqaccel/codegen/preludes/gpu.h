// GPU prelude: a lane is a thread that owns a few channels, a block owns a range of the edges, sorted by receiver.
//
// Warps share a block's work as (segment, chunk of channels); the warps of a group have both in common and take turns at
// the edges. Rows of x and w reach shared memory some stages ahead; the edge matrices of the next stage are built by all
// threads while this one is computed; outputs stay in registers until the receiver's last edge. Everything is added in a
// fixed order where `deterministic` asks for it.
#pragma once
#include "abi.h"
#include "direction.h"
#include "gpu_blocks.h"
#include "gpu_lane.h"
#include "gpu_lane_sums.h"
#include "gpu_pipeline.h"
#include "gpu_rows.h"
#include "gpu_work_split.h"
#include "machine.h"

namespace {

// ---- what a segment's edge() reads and writes

template <int n, int d>
struct Components {
  LaneOf<n> v[d];
  EQ_FN LaneOf<n> operator[](int i) const { return v[i]; }
};
template <class S>
struct SharedX {
  const T* row;
  const Channels<S>& channels;
  template <int d>
  EQ_FN Components<S::lane_channels, d> block(int staged) const {
    Components<S::lane_channels, d> x;
    channels.template read<d>(row, staged, x.v);
    return x;
  }
};
template <class S>
struct SharedWeights {
  const W* row;  // at the lane's first channel
  const Channels<S>& channels;
  EQ_FN LaneOf<S::lane_channels> at(int staged, int) const {
    return load<S::lane_channels>(row + staged, channels.active);
  }
};

// Where a row is, found anew at each use: its number takes one register, its address two.
template <int dim>
EQ_FN T* row_of(T* rows, int row) {
  return rows + int64_t(computed_again(row)) * dim;
}

template <class P, class S, int d1, bool adds>
struct XBlock {
  static constexpr int n = S::lane_channels;
  const Channels<S>& channels;
  LaneOf<n> rows[tangents][d1], gx[gradients][d1];
  T* turned;
  int offset, gx_row;
  const eq_operands& o;
  EQ_FN LaneOf<n> x(int i, int) const { return rows[0][i]; }
  EQ_FN LaneOf<n> a(int i, int) const { return rows[1][i]; }
  EQ_FN LaneOf<n> p(int i, int) const { return rows[2][i]; }
  EQ_FN void add(int i, int, LaneOf<n> value) { gx[0][i] = gx[0][i] + value; }
  EQ_FN void add_a(int i, int, LaneOf<n> value) { gx[1][i] = gx[1][i] + value; }
  EQ_FN void flush() {
    const auto put = [](T* to, LaneOf<n> value) { stream_store(to, (adds ? value + load<n>(to, true) : value).v); };
    const auto add = [](T* to, LaneOf<n> value) { atomic_add(to, value.v); };
#pragma unroll
    for (int of = 0; of < gradients; ++of) {
      T* const sums = static_cast<T*>(of == 0 ? o.gx : o.ga);
      // Of each edge; those of `a` stand behind all of those of x.
      T* const shares = static_cast<T*>(o.workspace) + of * o.num_edges * P::x_dim;
      if (by_rows) channels.template write<d1>(row_of<P::x_dim>(sums, gx_row), offset, gx[of], turned, put);
      else if (o.deterministic)
        channels.template write_components<d1>(row_of<P::x_dim>(shares, gx_row), offset, gx[of], put);
      else channels.template write<d1>(row_of<P::x_dim>(sums, gx_row), offset, gx[of], turned, add);
    }
  }
};
template <int n>
struct Weight {
  LaneOf<n> w, c[tangents], gw[gradients];  // tangents from 1 on
  T* gw_rows[gradients];
  bool active;
  EQ_FN LaneOf<n> at(int) const { return w; }
  EQ_FN LaneOf<n> tangent(int) const { return c[1]; }
  EQ_FN LaneOf<n> second_tangent(int) const { return c[2]; }
  template <bool first, bool>
  EQ_FN void add(int, LaneOf<n> value) {
    gw[0] = first ? value : gw[0] + value;
  }
  template <bool first, bool>
  EQ_FN void add_c(int, LaneOf<n> value) {
    gw[1] = first ? value : gw[1] + value;
  }
  EQ_FN void flush() const {
    if (!active) return;
#pragma unroll
    for (int of = 0; of < gradients; ++of) stream_store(gw_rows[of], gw[of].v);
  }
};
template <class P, class S>
struct EdgeRows {
  static constexpr int n = S::lane_channels;
  const Channels<S>& channels;
  const eq_operands& o;
  // Shared memory; of tangents t, so many elements behind. Weights at the lane's first channel, x at its first element.
  const T* x_row;
  const W* w_row;
  int tangent_step;
  T* gw_rows[gradients];  // device memory, likewise
  int gx_row;
  T* turned;
  LaneOf<n>*gz[gradients], *ggz;  // registers
  template <int d1, int, bool adds>
  EQ_FN XBlock<P, S, d1, adds> x_block(int staged, int offset) const {
    XBlock<P, S, d1, adds> block{channels, {}, {}, turned, offset, gx_row, o};
#pragma unroll
    for (int t = 0; t < tangents; ++t) channels.template read<d1>(x_row, t * tangent_step + staged, block.rows[t]);
#pragma unroll
    for (int of = 0; of < gradients; ++of) {
#pragma unroll
      for (int i = 0; i < d1; ++i) block.gx[of][i] = load<n>(static_cast<const T*>(nullptr), false);
    }
    return block;
  }
  template <int mul>
  EQ_FN Weight<n> weight(int staged, int offset) const {
    Weight<n> weight;
    weight.w = load<n>(w_row + staged, channels.active);
    // Kernels with tangents read weights in the type of everything else.
#pragma unroll
    for (int t = 1; t < tangents; ++t)
      weight.c[t] = load<n>(reinterpret_cast<const T*>(w_row) + t * tangent_step + staged, channels.active);
#pragma unroll
    for (int of = 0; of < gradients; ++of) weight.gw_rows[of] = gw_rows[of] + offset;
    weight.active = channels.active;
    return weight;
  }
  template <int mul>
  EQ_FN LaneOf<n> g(int component, int, int) const {
    return gz[0][component];
  }
  template <int mul>
  EQ_FN LaneOf<n> tangent_g(int component, int, int) const {
    return gz[1][component];
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
  T* const turned;  // and in which lanes change elements, of this warp; where it has room there, the same
  const Channels<S> channels;
  LaneOf<n> z[writes_z ? S::outputs : 1];
  LaneOf<n> g[gradients][has_gradient ? S::outputs : 1];

  EQ_FN Worker(Pipeline<P>& pipe_, const eq_work_split& split_, const BlockRange& range_, int first_group, int warp,
               T* sums_, T* turned_)
      : pipe(pipe_), o(pipe_.o), split(split_), range(range_), group(first_group + warp / S::warps_per_group),
        group_warp(warp % S::warps_per_group), sums(sums_ + warp / S::warps_per_group * S::sums),
        turned(S::turned > 0 ? turned_ + warp * S::turned : sums + group_warp * S::room),
        channels(warp / S::warps_per_group, pipe_.lane) {}

  EQ_FN void begin(int receiver) {
    const void* const rows[] = {o.gz, o.g};
    const int64_t from = int64_t(receiver) * P::z_dim;
#pragma unroll
    for (int k = 0; k < S::outputs; ++k)
      if (writes_z) z[k] = load<n>(static_cast<const T*>(nullptr), false);
    if constexpr (has_gradient) {
      S::each_z([&](auto block) {
        typedef decltype(block) B;
#pragma unroll
        for (int of = 0; of < gradients; ++of)
          channels.template read<B::d>(static_cast<const T*>(rows[of]) + from, B::offset, g[of] + B::first);
      });
    }
  }

  EQ_FN void finish(int receiver) {
    if (!writes_z) return;
    T* const row = range.target(split, static_cast<T*>(o.z), receiver, P::z_dim);
    if constexpr (S::warps_per_group == 1) {
      if (P::sums > 0 && !EQ_WARP_BARRIERS) wait_for_group();
      S::each_z([&](auto block) {
        typedef decltype(block) B;
        channels.template write<B::d>(row, B::offset, z + B::first, turned,
                                      [](T* to, LaneOf<n> value) { stream_store(to, value.v); });
      });
      if (P::sums > 0 && !EQ_WARP_BARRIERS) wait_for_group();
    } else {
      S::each_z([&](auto block) {
        typedef decltype(block) B;
        T* const to = sums + (group_warp * S::outputs + B::first) * channels.of_warp;
        channels.template lay<B::d>(z + B::first, to, pipe.lane);
      });
      const LaneOf<n>* const of_lane = reinterpret_cast<const LaneOf<n>*>(sums) + pipe.lane;
      wait_for_group();
#pragma unroll 1
      for (int k = group_warp; k < S::outputs; k += S::warps_per_group) {
        LaneOf<n> total = of_lane[k * 32];
#pragma unroll
        for (int of = 1; of < S::warps_per_group; ++of) total = total + of_lane[(of * S::outputs + k) * 32];
        const ZRow at = S::z_row(k);
        if (channels.has_row(at.row, at.d)) stream_store(row + at.offset + channels.place(at.row, at.d), total.v);
      }
      wait_for_group();
    }
  }
  EQ_FN void wait_for_group() const {
    static_assert(S::warps_per_group == 1 || P::warp_groups < 16, "each group has a barrier");
    wait_for_warps(1 + group, S::warps_per_group);
  }

  EQ_FN void run_edge(int step, int e) {
    const T* rows = pipe.rows(step, e);
    const W* weights = reinterpret_cast<const W*>(rows + L::x_row) + channels.first;
    const T* entries = pipe.entries(step, e);
    if constexpr (!has_gradient) {
      S::edge(SharedX<S>{rows, channels}, SharedWeights<S>{weights, channels}, entries, z);
    } else {
      constexpr int components = power_of_two(P::y_dim);
      Sum gy[gradients][components];
#pragma unroll
      for (int of = 0; of < gradients; ++of)
#pragma unroll
        for (int j = 0; j < components; ++j) gy[of][j] = 0;
      const int2 id = pipe.id(step, e);
      EdgeRows<P, S> operands{channels, o};
      operands.x_row = rows;
      operands.w_row = weights;
      operands.tangent_step = L::edge / tangents;
      operands.gx_row = by_rows || o.deterministic ? pipe.slot(step, e) - split.first : id.y;
      const int64_t gw_from = int64_t(pipe.edge(step, e)) * P::w_dim + channels.first;
      operands.gw_rows[0] = static_cast<T*>(o.gw) + gw_from;
      if constexpr (has_second) operands.gw_rows[1] = static_cast<T*>(o.gc) + gw_from;
      operands.turned = turned;
#pragma unroll
      for (int of = 0; of < gradients; ++of) operands.gz[of] = g[of];
      operands.ggz = z;
      if constexpr (has_second)
        S::edge(operands, entries, entries + P::entries, entries + 2 * P::entries, gy[0], gy[1]);
      else S::edge(operands, entries, entries + P::entries, gy[0]);
#pragma unroll
      for (int of = 0; of < gradients; ++of) add_over_lanes<components, 16>(gy[of], pipe.lane);
      constexpr int shift = 5 - log2_of(components < 32 ? components : 32),
                    each = components < 32 ? 1 : components / 32;
      T* to = pipe.shared + L::gy + (step & 1) * L::gy_stage + (e * P::warp_groups + group) * P::y_dim;
      if ((pipe.lane & ((1 << shift) - 1)) == 0) {
#pragma unroll
        for (int q = 0; q < each; ++q) {
          const int j = (pipe.lane >> shift) * each + q;
#pragma unroll
          for (int of = 0; of < gradients; ++of)
            if (j < P::y_dim) to[of * L::gy_share + j] = gy[of][q];
        }
      }
    }
  }

  // Gradients of y of a finished stage: the shares of the warp groups, in order.
  EQ_FN void write_attribute_gradients(int step) const {
    if (!has_gradient || step < 0 || step >= pipe.steps) return;
    void* const results[] = {o.gy, o.gb};
#pragma unroll
    for (int n = 0; n < gradients; ++n) {
      const T* from = pipe.shared + L::gy + (step & 1) * L::gy_stage + n * L::gy_share;
      for (int t = pipe.thread; t < pipe.count(step) * P::y_dim; t += L::threads) {
        const int e = t / P::y_dim, j = t - e * P::y_dim;
        T total = 0;
#pragma unroll
        for (int of = 0; of < P::warp_groups; ++of) total += from[(e * P::warp_groups + of) * P::y_dim + j];
        T& gradient = static_cast<T*>(results[n])[int64_t(pipe.edge(step, e)) * P::y_dim + j];
        gradient = P::adds ? gradient + total : total;
      }
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
  const BlockRange range(receivers_of(o), split, blockIdx.x, split.first, split.last, writes_z);
  if (!range.exists) return;
  Pipeline<P> pipe(o, split, shared, range.first, range.last);
  T *sums = shared + Layout<P>::sums, *turned = shared + Layout<P>::turned;
  int warps = 0, warp_groups = 0;
  P::each_segment([&](auto segment) EQ_INLINED {
    typedef decltype(segment) S;
    if (pipe.warp >= warps && pipe.warp < warps + S::warp_groups * S::warps_per_group) {
      Worker<P, S> worker(pipe, split, range, warp_groups, pipe.warp - warps, sums, turned);
      worker.run();
    }
    warps += S::warp_groups * S::warps_per_group;
    warp_groups += S::warp_groups;
    sums += S::warp_groups * S::sums;
    turned += S::warp_groups * S::warps_per_group * S::turned;
  });
}

// What the kernels that add whole rows need of a problem: gradients of x of slots are laid out (2l+1, mul).
template <class P>
struct ChannelsFastest : P {
  static constexpr bool moves_gx = mul_ir;
};

}  // namespace

// The kernels of a translation unit; csrc/runtime/gpu_kernel.cpp launches them.
#define EQ_EXPORT_MAIN(name, P)                                                                                        \
  EQ_KERNEL void __launch_bounds__(Layout<P>::threads, EQ_RESIDENT(P::blocks_per_sm))                                  \
      name(const EQ_PARAMETER eq_operands o, const EQ_PARAMETER eq_work_split split) {                                 \
    static_assert(Layout<P>::bytes == P::shared_bytes, "the plan and the layout count shared memory alike");           \
    extern __shared__ __align__(128) unsigned char shared[];                                                           \
    run_block<P>(o, split, reinterpret_cast<T*>(shared));                                                              \
  }
#define EQ_EXPORT_SUMS(P)                                                                                              \
  EQ_KERNEL void eq_add_partials(const EQ_PARAMETER eq_operands o, const EQ_PARAMETER eq_work_split split) {           \
    add_receiver_partials<P>(o, split);                                                                                \
  }                                                                                                                    \
  EQ_KERNEL void __launch_bounds__(128, 8)                                                                             \
      eq_gather_gx(const EQ_PARAMETER eq_operands o, const EQ_PARAMETER eq_work_split split) {                         \
    gather_gx<P>(o, split);                                                                                            \
  }                                                                                                                    \
  EQ_KERNEL void eq_add_gx_partials(const EQ_PARAMETER eq_operands o, const EQ_PARAMETER eq_work_split split) {        \
    add_sender_partials<P>(o, split);                                                                                  \
  }
#define EQ_EXPORT(P) EQ_EXPORT_SUMS(ChannelsFastest<P>)

// GPU prelude: pairs of channels that a dense matrix mixes, and shared memory around it.
//
// A team of lanes has the channels of the output of an edge, some for each lane: it reads each weight once, for all
// components and for all that a direction asks for. What is a sum over channels is added up over the lanes of the team,
// for some pairs together.
#pragma once
#include "gpu.h"
#include "pairs.h"

namespace {

constexpr int warp = 32;

// Where elements of a block of irreps stand behind its first: in the layout (2l+1, mul), or (mul, 2l+1).
template <int mul, int dim>
struct InBlock {
  bool mul_ir;
  EQ_FN int channel(int c) const { return mul_ir ? c * dim : c; }
  // Runs on all components of a channel. Forward, their distances are constants on either side of a branch that all lanes
  // take; kernels with gradients, whose code is long, are faster without.
  template <class F>
  EQ_FN void each(int c, const F& run) const {
    const int first = channel(c);
    if (mul == 1 || (!has_gradient && mul_ir)) visit(first, 1, run);
    else if (!has_gradient) visit(first, mul, run);
    else visit(first, mul_ir ? 1 : mul, run);
  }

 private:
  template <class F>
  static EQ_FN void visit(int first, int step, const F& run) {
#pragma unroll
    for (int k = 0; k < dim; ++k) run(k, first + k * step);
  }
};

// Shared memory, in elements: arrays (edge, pair, component) of a tile, sums of edges, and then their numbers.
template <class P>
struct PairLayout {
  typedef P Problem;
  static constexpr int edges = P::edges, lanes = warp / edges, span = P::span, array = edges * span;
  static constexpr int t = 0, ta = array, gt = has_tangents ? 2 * array : array, gtc = gt + array;
  static constexpr int sums = (has_tangents ? 4 : has_gradient ? 2 : 1) * array;
  // Of the row of an edge.
  static constexpr int gx_sum = writes_z ? P::z_dim : 0, gy_sum = gx_sum + (has_gradient ? P::x_dim : 0);
  static constexpr int end = gy_sum + (has_gradient ? P::y_dim : 0), row = P::rows_shared ? (end + 3) / 8 * 8 + 4 : 0;
  static constexpr int ids = sums + edges * row, bytes = ids * int(sizeof(T)) + 3 * edges * int(sizeof(int));
  // Of edges, then of their senders, then of their receivers.
  static EQ_FN int* numbers(T* shared) { return reinterpret_cast<int*>(shared + ids); }
};

template <int n>
EQ_FN void put(T* to, const T* values) {
#pragma unroll
  for (int k = 0; k < n; ++k) to[k] = values[k];
}
// Elements of shared memory, by wide loads where all begin at a multiple of their number.
template <int n>
EQ_FN void get(const T* from, T* values) {
  constexpr int width = n % 4 == 0 && sizeof(T) == 4 ? 4 : n % 2 == 0 ? 2 : 1;
#pragma unroll
  for (int k = 0; k < n; k += width) {
    const LaneOf<width> part = load<width>(from + k, true);
#pragma unroll
    for (int u = 0; u < width; ++u) values[k + u] = part.v[u];
  }
}

// Sums of n values over the lanes of a team. At each level a lane gives away half of its values, so that n sums take
// about n shuffles; it is left with those from `first` to `last`, one at least, which other lanes may have too.
template <int n, int lanes>
struct TeamSums {
  T v[n];
  int first = 0, last = n;
  bool only = true;  // whether this lane is the one that writes them

  EQ_FN TeamSums(const T* values, int lane) {
    put<n>(v, values);
    add<n, lanes / 2>(lane);
  }
  template <int m, int offset>
  EQ_FN void add(int lane) {
    if constexpr (offset > 0) {
      constexpr int half = (m + 1) / 2;
      const bool upper = lane & offset;
      if constexpr (m > 1) {
#pragma unroll
        for (int q = 0; q < half; ++q) {
          const T high = q + half < m ? v[q + half] : T(0), give = upper ? v[q] : high, keep = upper ? high : v[q];
          v[q] = keep + shuffle_xor(give, offset);
        }
        last = upper ? last : min(last, first + half);
        first += upper ? half : 0;
      } else {
        v[0] += shuffle_xor(v[0], offset);
        only = only && !upper;
      }
      add<half, offset / 2>(lane);
    }
  }
  static EQ_FN constexpr int held(int m, int of) { return of == 1 ? m : held((m + 1) / 2, of / 2); }
  template <class F>
  EQ_FN void each(const F& run) const {
#pragma unroll
    for (int q = 0; q < held(n, lanes); ++q)
      if (only && first + q < last) run(first + q, v[q]);
  }
};

// Lanes of a team, at least so many: few channels are missing to a full team, and few lanes share them.
EQ_FN constexpr int most_channels(int d3) { return d3 <= 4 ? 4 : d3 <= 16 ? 16 / d3 : 1; }
EQ_FN constexpr int channels_of_lane(int mul3, int d3, int lanes) {
  const int wanted = (mul3 + lanes - 1) / lanes, most = most_channels(d3);
  return wanted < most ? wanted : most;
}
EQ_FN constexpr int lanes_of_team(int mul3, int d3, int least) {
  int best = warp, best_room = 0;
  for (int lanes = least; lanes <= warp; lanes *= 2) {
    const int room = lanes * channels_of_lane(mul3, d3, lanes);
    if (room < mul3 || (best_room > 0 && room >= best_room)) continue;
    best = lanes;
    best_room = room;
  }
  return best;
}

// The tile of pairs that is worked on: `count` of them from `first` on.
struct Tile {
  T* shared;
  int lane, first, count;
};

// What mixing reads and writes, of all edges.
struct MixedRows {
  const T *w, *c, *gz;
  T *z, *gw;  // z: the row where there is none in shared memory
  int64_t w_stride, c_stride;
  int edges, z_offset;
  bool mul_ir;  // the layout of z and gz
};

// Pairs that a lane takes together, so that as many weights are on their way and their sums take few shuffles.
EQ_FN constexpr int pairs_together(int d3) {
  const int most = d3 == 1 ? 8 : d3 <= 5 ? 4 : d3 <= 8 ? 2 : 1;
  return most > 1 && has_tangents ? most / 2 : most;
}
// Pairs of a tile.
template <class L>
EQ_FN constexpr int pairs_at_a_time(int d3, int pairs) {
  const int most = L::span / d3, together = pairs_together(d3);
  return pairs <= most ? pairs : most / together * together;
}

// A team on the pairs of a tile. Its rows begin at the first of these pairs and at a lane's first channel.
template <class L, int d3, int mul3, bool weighted>
struct MixingTeam {
  typedef typename L::Problem P;
  static constexpr int lanes = lanes_of_team(mul3, d3, L::lanes), channels = channels_of_lane(mul3, d3, lanes);
  static constexpr int columns = lanes * channels;
  static constexpr bool has_c = has_tangents && weighted, writes_w = has_gradient && weighted;

  const int lane, column;
  const bool active;
  const InBlock<mul3, d3> in_z;
  const T *w, *c;
  T *gw, *z_row, *t;
  T z[writes_z ? channels : 1][d3] = {}, g[has_gradient ? channels : 1][d3];

  EQ_FN MixingTeam(const Tile& at, const MixedRows& rows, int first_edge, int first_column)
      : lane(at.lane), column(first_column + lane % lanes), active(first_edge + lane / lanes < rows.edges),
        in_z{rows.mul_ir} {
    const int e = min(first_edge + lane / lanes, rows.edges - 1);  // lanes without an edge help to add up
    const int* const ids = L::numbers(at.shared);
    const int64_t edge = ids[e];
    const int first = at.first * mul3 + column;
    w = rows.w + edge * rows.w_stride + first;
    c = rows.c + edge * rows.c_stride + first;
    gw = rows.gw + edge * P::w_dim + first;
    z_row = (P::rows_shared ? at.shared + L::sums + e * L::row + rows.z_offset : rows.z) + in_z.channel(column);
    t = at.shared + e * L::span;
    if constexpr (has_gradient) {
      const T* const gz = rows.gz + int64_t(ids[2 * L::edges + e]) * P::z_dim + in_z.channel(column);
#pragma unroll
      for (int v = 0; v < channels; ++v)
        in_z.each(v * lanes, [&](int k, int n) { g[v][k] = has(v) ? __ldg(gz + n) : T(0); });
    }
  }
  EQ_FN bool has(int v) const { return active && (mul3 % columns == 0 || column + v * lanes < mul3); }

  // A team has much to do with its weights where there are gradients: it asks for those of its next pairs meanwhile.
  EQ_FN void prefetch(int p, int pairs) const {
    if (!has_gradient || !weighted || !active || column >= columns) return;
    constexpr int line = 128 / sizeof(T);
    const int begin = p * mul3 - column;
    for (int n = lane % lanes * line; n < pairs * mul3; n += lanes * line) {
      prefetch_line(w + begin + n);
      if constexpr (has_c) prefetch_line(c + begin + n);
    }
  }

  // Mixes n pairs from p on.
  template <int n>
  EQ_FN void mix(int p) {
    constexpr int values = n * d3;
    const T *const w_p = w + p * mul3, *const c_p = c + p * mul3;
    T* const gw_p = gw + p * mul3;
    T weights[n][channels], tangents[has_c ? n : 1][channels], t0[values], ta[values];
#pragma unroll
    for (int q = 0; q < n; ++q)
#pragma unroll
      for (int v = 0; v < channels; ++v) {
        const int element = q * mul3 + v * lanes;
        weights[q][v] = !has(v) ? T(0) : weighted ? __ldg(w_p + element) : T(1);
        if constexpr (has_c) tangents[q][v] = has(v) ? __ldg(c_p + element) : T(0);
      }
    if constexpr (!has_tangents || has_c) get<values>(t + L::t + p * d3, t0);
    if constexpr (has_tangents) get<values>(t + L::ta + p * d3, ta);
    const T* const varied = has_tangents ? ta : t0;
    T gt[values] = {}, gtc[values] = {};
#pragma unroll
    for (int q = 0; q < n; ++q)
#pragma unroll
      for (int v = 0; v < channels; ++v) {
        T gradient[1] = {};
#pragma unroll
        for (int k = 0; k < d3; ++k) {
          if constexpr (writes_z) z[v][k] += varied[q * d3 + k] * weights[q][v];
          if constexpr (has_c) z[v][k] += t0[q * d3 + k] * tangents[q][v];
          if constexpr (has_gradient) gt[q * d3 + k] += weights[q][v] * g[v][k];
          if constexpr (has_c) gtc[q * d3 + k] += tangents[q][v] * g[v][k];
          if constexpr (writes_w) gradient[0] += varied[q * d3 + k] * g[v][k];
        }
        if constexpr (writes_w) {
          if (has(v)) stream_store(gw_p + q * mul3 + v * lanes, gradient);
        }
      }
    if constexpr (has_gradient) put_sums<values>(gt, t + L::gt + p * d3);
    if constexpr (has_c) put_sums<values>(gtc, t + L::gtc + p * d3);
  }
  // Those of the first channels are written, and others added to them.
  template <int values>
  EQ_FN void put_sums(const T* of_lane, T* to) const {
    const TeamSums<values, lanes> sums(of_lane, lane);
    if (active) sums.each([&](int n, T sum) { to[n] = mul3 > columns && column >= columns ? to[n] + sum : sum; });
  }
  EQ_FN void add_z() const {
    if constexpr (writes_z) {
#pragma unroll
      for (int v = 0; v < channels; ++v)
        if (has(v)) in_z.each(v * lanes, [&](int k, int n) { z_row[n] += z[v][k]; });
    }
  }
};

// Mixing by a dense matrix (pair, channel): the same code for all paths with as many components, channels and pairs.
template <class L, int d3, int mul3, int pairs, bool weighted>
__device__ __noinline__ void mix_densely(const Tile at, const MixedRows rows) {
  typedef MixingTeam<L, d3, mul3, weighted> Team;
  constexpr int together = pairs_together(d3), rest = pairs % together;
#pragma unroll 1
  for (int column = 0; column < mul3; column += Team::columns) {
#pragma unroll 1
    for (int edge = 0; edge < rows.edges; edge += warp / Team::lanes) {
      Team team(at, rows, edge, column);
      int p = 0;
      if constexpr (pairs >= together) {
#pragma unroll 1
        for (; p + together <= at.count; p += together) {
          team.prefetch(p + together, min(together, at.count - p - together));
          team.template mix<together>(p);
        }
      }
      if constexpr (rest > 0) {
        if (p < at.count) team.template mix<rest>(p);
      }
      team.add_z();
    }
  }
}

}  // namespace

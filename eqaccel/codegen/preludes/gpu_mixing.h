// GPU prelude: pairs of channels that a dense matrix mixes.
//
// A team of lanes has the channels of the output of an edge, some for each lane: it reads each weight once, for all
// components and for all that a direction asks for. What is a sum over channels is added up over the lanes of the team,
// for some pairs together.
#pragma once
#include "gpu_pair_rows.h"
#include "pairs.h"

namespace {

// Where elements of a block of irreps stand behind its first: in the layout (2l+1, mul), or (mul, 2l+1).
template <int mul, int dim>
struct InBlock {
  bool mul_ir;
  EQ_FN int channel(int c) const { return mul_ir ? c * dim : c; }
  EQ_FN int element(int c, int k) const { return channel(c) + (mul_ir ? k : k * mul); }
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

// Sums of n values over the lanes of a team, which are so many apart. At each level a lane gives away half of its values, so
// that n sums take about n shuffles; it is left with those from `first` to `last`, one at least, which other lanes may have
// too.
template <int n, int lanes, int apart = 1>
struct TeamSums {
  T v[n];
  int first = 0, last = n;
  bool only = true;  // whether this lane is the one that writes them

  EQ_FN TeamSums(const T* values, int lane) {
    put<n>(v, values);
    add<n, lanes / 2>(lane / apart);
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
          v[q] = keep + shuffle_xor(give, offset * apart);
        }
        last = upper ? last : min(last, first + half);
        first += upper ? half : 0;
      } else {
        v[0] += shuffle_xor(v[0], offset * apart);
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

// How many lanes mix the pairs of an edge, with how many channels each, and how many pairs together; the pairs that the
// code is for. The plan says why.
template <int lanes_, int channels_, int together_, int pairs_>
struct MixingCode {
  static constexpr int lanes = lanes_, channels = channels_, together = together_, pairs = pairs_;
};
// With how many pairs are coupled together, and have their weights copied together.
template <class Code_, int tile_, int chunk_>
struct Mixing {
  typedef Code_ Code;
  static constexpr int tile = tile_, chunk = chunk_;
  static constexpr bool whole_pairs = EQ_BULK_COPY && chunk > 0 && Code::lanes == 1;  // a lane has all channels
};

// The tile of pairs that is worked on: `count` of them from `first` on, `chunk` of which have their weights copied together.
struct Tile {
  T* shared;
  int lane, first, count, chunk;
};

// What mixing reads and writes, of all edges: rows, and where a path has its elements in them.
struct MixedRows {
  EdgeWeights weights;
  const T* gz;
  T *z, *gw;  // z: the row where there is none in shared memory
  int w_offset, z_offset;
  bool mul_ir;  // the layout of z and gz
};

// A team on the pairs of a tile. Its rows begin at the first of these pairs and at a lane's first channel.
template <class L, class M, int d3, int mul3, bool weighted>
struct MixingTeam {
  typedef typename L::Problem P;
  static constexpr int lanes = M::lanes, channels = M::channels, columns = lanes * channels;
  static constexpr bool has_c = has_tangents && weighted, writes_w = has_gradient && weighted;
  static constexpr bool copied = P::copies != no_copies;

  T* const shared;
  const int lane, e, column;
  const bool active;
  const InBlock<mul3, d3> in_z;
  const T *w_row, *c_row;  // of the edge, in device memory
  const T *w, *c;
  T *gw, *z_row, *t;
  T z[writes_z ? channels : 1][d3] = {}, g[has_gradient ? channels : 1][d3];

  // Lanes without an edge help to add up.
  EQ_FN MixingTeam(const Tile& at, const MixedRows& rows, int first_edge, int first_column)
      : shared(at.shared), lane(at.lane), e(min(first_edge + lane / lanes, rows.weights.edges - 1)),
        column(first_column + lane % lanes), active(first_edge + lane / lanes < rows.weights.edges), in_z{rows.mul_ir},
        w_row(rows.weights.w + edge() * rows.weights.w_stride), c_row(rows.weights.c + edge() * rows.weights.c_stride) {
    const int first = rows.w_offset + at.first * mul3 + column;
    w = (L::copies_w ? copied_row<L>(shared, e, w_copy) : w_row) + first;
    c = c_row + first;
    gw = rows.gw + edge() * P::w_dim + first;
    z_row = (P::rows_shared ? shared + L::sums + e * L::row : rows.z) + rows.z_offset + in_z.channel(column);
    t = shared + e * L::span;
    if constexpr (has_gradient) {
      const T* const row = rows.gz + int64_t(L::numbers(shared)[2 * L::edges + e]) * P::z_dim;
      const T* const gz = (copied ? copied_row<L>(shared, e, gz_copy) : row) + rows.z_offset + in_z.channel(column);
#pragma unroll
      for (int v = 0; v < channels; ++v)
        in_z.each(v * lanes, [&](int k, int n) { g[v][k] = has(v) ? read(gz + n) : T(0); });
    }
  }
  EQ_FN int64_t edge() const { return L::numbers(shared)[e]; }
  // From shared memory, or from device memory, where nobody writes.
  static EQ_FN T read(const T* from) { return copied ? *from : __ldg(from); }
  EQ_FN bool has(int v) const { return active && (mul3 % columns == 0 || column + v * lanes < mul3); }

#if EQ_BULK_COPY
  // Goes on with the weights of a chunk, from pair p on.
  EQ_FN void take(int number, int first_pair, int p, int w_offset) {
    const int first = w_offset + (first_pair + p) * mul3, begin = column - p * mul3;
    wait_for_chunk<L>(shared, number);
    w = L::chunk_place(shared, e, number, 0) + misalignment(w_row + first) + begin;
    if constexpr (has_c) c = L::chunk_place(shared, e, number, 1) + misalignment(c_row + first) + begin;
  }
#endif
  // A team has much to do with its weights where there are gradients: it asks for those of its next pairs meanwhile.
  EQ_FN void prefetch(int p, int pairs) const {
    if (copied || !has_gradient || !weighted || !active || column >= columns) return;
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
        weights[q][v] = !has(v) ? T(0) : weighted ? read(w_p + element) : T(1);
        if constexpr (has_c) tangents[q][v] = has(v) ? read(c_p + element) : T(0);
      }
    if constexpr (!has_tangents || has_c) get<values>(t + L::t + p * d3, t0);
    if constexpr (has_tangents) get<values>(t + L::ta + p * d3, ta);
    const T* const varied = has_tangents ? ta : t0;
    T gt[values] = {}, gtc[values] = {};
#pragma unroll
    for (int q = 0; q < n; ++q)
#pragma unroll
      for (int v = 0; v < channels; ++v) {
        T gradient = 0;
#pragma unroll
        for (int k = 0; k < d3; ++k) {
          if constexpr (writes_z) z[v][k] += varied[q * d3 + k] * weights[q][v];
          if constexpr (has_c) z[v][k] += t0[q * d3 + k] * tangents[q][v];
          if constexpr (has_gradient) gt[q * d3 + k] += weights[q][v] * g[v][k];
          if constexpr (has_c) gtc[q * d3 + k] += tangents[q][v] * g[v][k];
          if constexpr (writes_w) gradient += varied[q * d3 + k] * g[v][k];
        }
        if constexpr (writes_w) {
          if (has(v)) store(gw_p + q * mul3 + v * lanes, gradient);
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
  // Mixes pairs from p to `end`: a multiple of M::together behind p, or the end of all pairs.
  EQ_FN void mix_all(int p, int end) {
    constexpr int together = M::together, rest = M::pairs % together;
    if constexpr (M::pairs >= together) {
#pragma unroll 1
      for (; p + together <= end; p += together) {
        prefetch(p + together, min(together, end - p - together));
        mix<together>(p);
      }
    }
    if constexpr (rest > 0) {
      if (p < end) mix<rest>(p);
    }
  }
};

// Mixing by a dense matrix (pair, channel): the same code for all paths with as many components, channels and pairs.
template <class L, class M, int d3, int mul3, bool weighted>
__device__ __noinline__ NextChunk mix_densely(const Tile at, const MixedRows rows, NextChunk next) {
  typedef MixingTeam<L, M, d3, mul3, weighted> Team;
#if EQ_BULK_COPY
  if constexpr (L::copies_chunks && weighted) {
    static_assert(Team::lanes == L::lanes && Team::columns >= mul3, "a team has all channels of its edge");
    Team team(at, rows, 0, 0);
#pragma unroll 1
    for (int p = 0; p < at.count; p += at.chunk) {
      team.take(next.mixed, at.first, p, rows.w_offset);
      team.mix_all(p, min(p + at.chunk, at.count));
      __syncwarp();
      copy_chunk<L>(at.shared, at.lane, rows.weights, next.mixed + L::stages, next);
      ++next.mixed;
    }
    team.add_z();
    return next;
  }
#endif
#pragma unroll 1
  for (int column = 0; column < mul3; column += Team::columns) {
#pragma unroll 1
    for (int edge = 0; edge < rows.weights.edges; edge += warp / Team::lanes) {
      Team team(at, rows, edge, column);
      team.mix_all(0, at.count);
      team.add_z();
    }
  }
  return next;
}

}  // namespace

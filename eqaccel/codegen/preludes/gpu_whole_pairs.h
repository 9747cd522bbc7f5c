// GPU prelude: pairs of channels that a dense matrix mixes, backward, where an output has fewer channels than an edge has
// lanes, and weights come in chunks.
//
// A lane mixes whole pairs, with all channels of the output, so that no lane is left without one and sums over channels
// are a lane's own. Gradients of weights take the place of the weights, and are stored a chunk at a time.
#pragma once
#include "gpu_mixing.h"

namespace {

// Mixing by a dense matrix (pair, channel), as mix_densely does.
template <class L, int d3, int mul3>
__device__ __noinline__ NextChunk mix_whole_pairs(const Tile at, const MixedRows rows, NextChunk next);

#if EQ_BULK_COPY

template <class L, int d3, int mul3>
struct WholePairs {
  typedef typename L::Problem P;
  static constexpr int quad = 16 / sizeof(T), width = mul3 % quad == 0 ? quad : mul3 % 2 == 0 ? 2 : 1;

  T* const shared;
  const int lane, e;  // among the lanes of its edge
  const bool has_edge;
  T* const t;
  T g[mul3][d3];

  EQ_FN WholePairs(const Tile& at, const MixedRows& rows)
      : shared(at.shared), lane(at.lane % L::lanes), e(min(at.lane / L::lanes, rows.weights.edges - 1)),
        has_edge(at.lane / L::lanes < rows.weights.edges), t(shared + e * L::span) {
    const T* const gz = copied_row<L>(shared, e, gz_copy) + rows.z_offset;
#pragma unroll
    for (int c = 0; c < mul3; ++c) InBlock<mul3, d3>{rows.mul_ir}.each(c, [&](int k, int n) { g[c][k] = gz[n]; });
  }

  // A pair of the tile, whose weights are at w: some channels at a time, of which all begin at a multiple of their number.
  template <int channels>
  EQ_FN void mix(int pair, T* w) const {
    T t0[d3], gt[d3] = {};
    get<d3>(t + L::t + pair * d3, t0);
#pragma unroll
    for (int first = 0; first < mul3; first += channels) {
      T weights[channels];
      LaneOf<channels> gradients = {};
      get<channels>(w + first, weights);
#pragma unroll
      for (int u = 0; u < channels; ++u)
#pragma unroll
        for (int k = 0; k < d3; ++k) {
          gt[k] += weights[u] * g[first + u][k];
          gradients.v[u] += t0[k] * g[first + u][k];
        }
      *reinterpret_cast<LaneOf<channels>*>(w + first) = gradients;
    }
    put<d3>(t + L::gt + pair * d3, gt);
  }
  // Pairs of the tile from `pair` on, which have a chunk of weights.
  template <int channels>
  EQ_FN void mix_all(int pair, int pairs, T* w) const {
#pragma unroll 1
    for (int n = lane; n < pairs; n += L::lanes) mix<channels>(pair + n, w + n * mul3);
  }
  EQ_FN void store_chunk(const T* from, T* to, int elements) const {
    const bool wide = (shared_address(from) | reinterpret_cast<unsigned long long>(to)) % 16 == 0;
    const int whole = wide ? elements / quad * quad : 0;
#pragma unroll 2
    for (int n = lane * quad; n < whole; n += L::lanes * quad) store(to + n, load<quad>(from + n, true).v);
#pragma unroll 1
    for (int n = whole + lane; n < elements; n += L::lanes) store(to + n, from[n]);
  }
  // `offset`: of the weights of the chunk among those of their edge.
  EQ_FN void mix_chunk(const MixedRows& rows, int chunk, int pair, int pairs, int offset) const {
    wait_for_chunk<L>(shared, chunk);
    if (has_edge) {
      const int64_t edge = L::numbers(shared)[e];
      T* const w =
          L::chunk_place(shared, e, chunk, 0) + misalignment(rows.weights.w + edge * rows.weights.w_stride + offset);
      if (shared_address(w) % (width * sizeof(T)) == 0) mix_all<width>(pair, pairs, w);
      else mix_all<1>(pair, pairs, w);
      meet_edge();
      store_chunk(w, rows.gw + edge * P::w_dim + offset, pairs * mul3);
    }
    publish_to_copies();
    __syncwarp();
  }
  // Waits for the lanes of the edge.
  EQ_FN void meet_edge() const {
    constexpr unsigned of_first = 0xffffffffu >> (warp - L::lanes);
    __syncwarp(of_first << e * L::lanes);
  }
};

template <class L, int d3, int mul3>
__device__ __noinline__ NextChunk mix_whole_pairs(const Tile at, const MixedRows rows, NextChunk next) {
  const WholePairs<L, d3, mul3> pairs(at, rows);
#pragma unroll 1
  for (int p = 0; p < at.count; p += at.chunk) {
    pairs.mix_chunk(rows, next.mixed, p, min(at.chunk, at.count - p), rows.w_offset + (at.first + p) * mul3);
    copy_chunk<L>(at.shared, at.lane, rows.weights, next.mixed + L::stages, next);
    ++next.mixed;
  }
  return next;
}

#endif

}  // namespace

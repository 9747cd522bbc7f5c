// GPU prelude of tensor products of any mode: a block is a warp, which takes one edge after another.
//
// A lane is a pair of channels where these are coupled, and a weight or a channel of the output where they are mixed; in
// between couplings are in shared memory, a tile of pairs at a time. What is added up over the paths of an edge or the
// edges of a receiver is in shared memory too, or in device memory if it does not fit. One lane adds to each sum, in a
// fixed order where `deterministic` asks for it.
#pragma once
#include "gpu.h"
#include "pairs.h"

namespace {

constexpr int warp = 32;

// Shared memory, in elements: arrays (component, pair) of a tile, sums of groups of lanes, and sums of rows.
template <class P>
struct PairLayout {
  static constexpr int tile = P::tile, twice = has_tangents ? 2 : 1;
  static constexpr int t = 0, ta = P::d3 * tile, gt = twice * ta, gtc = gt + ta;
  static constexpr int gx = gt + twice * ta, gy = gx + P::d1 * tile;
  static constexpr int groups = has_gradient ? gy + P::d2 * tile : ta, sums = groups + warp * P::d3;
  static constexpr int z_sum = sums, gx_sum = z_sum + (writes_z ? P::z_dim : 0);
  static constexpr int gy_sum = gx_sum + (has_gradient ? P::x_dim : 0);
  static constexpr int end = P::rows_shared ? gy_sum + (has_gradient ? P::y_dim : 0) : sums;
  static constexpr int bytes = (sums + (end - sums + 3) / 4 * 4) * int(sizeof(T));
};

// What an edge reads and writes: rows in device memory, and where its sums are.
struct PairRows {
  const T *x, *y, *w, *gz, *a, *b, *c;
  T *z, *gx, *gy, *gw;
  bool atomic;  // gradients of x are in device memory, and others add to them
};

EQ_FN void add_to(T* sum, T value, bool atomic) {
  if (atomic) atomicAdd(sum, value);
  else *sum += value;
}

// The tile of pairs that is worked on: `count` of them from `first` on.
struct Tile {
  T* shared;
  int lane, first, count;
};

// Mixing by a dense matrix (pair, channel), of all paths with as many components and channels: their code is one, because
// it is long. Pointers are those of the path.
template <int tile, int array_of_groups, int d3, int mul3, bool weighted>
struct DenseMixing {
  static EQ_FN T weight(const T* w, int n) { return weighted ? w[n] : T(1); }

  // Lanes are channels, or several groups of lanes all channels.
  template <int width>
  static EQ_FN void mix_columns(const Tile& at, const T* w, const T* t, T* z, int column) {
    constexpr int groups = warp / width;
    const int group = at.lane / width, c = at.lane % width;
    const bool active = group < groups;
    T sum[d3] = {};
#pragma unroll 4
    for (int p = group; p < at.count; p += groups) {
      const T value = active ? weight(w, (at.first + p) * mul3 + column + c) : T(0);
#pragma unroll
      for (int k = 0; k < d3; ++k) sum[k] += t[k * tile + p] * value;
    }
    if constexpr (groups > 1) {
      T* const of_groups = at.shared + array_of_groups + at.lane;
#pragma unroll
      for (int k = 0; k < d3; ++k) of_groups[k * warp] = sum[k];
      __syncthreads();
      if (at.lane < width) {
#pragma unroll
        for (int k = 0; k < d3; ++k)
          for (int of = 1; of < groups; ++of) sum[k] += of_groups[k * warp + of * width];
      }
      __syncthreads();
    }
    if (at.lane < width) {
#pragma unroll
      for (int k = 0; k < d3; ++k) z[k * mul3 + column + c] += sum[k];
    }
  }
  static __device__ __noinline__ void mix(const Tile at, const T* w, const T* t, T* z) {
    constexpr int rest = mul3 % warp;
#pragma unroll 1
    for (int column = 0; column < mul3 - rest; column += warp) mix_columns<warp>(at, w, t, z, column);
    if constexpr (rest > 0) mix_columns<rest>(at, w, t, z, mul3 - rest);
  }

  // gt = transposed matrix times gz; with `writes` also the gradient of the matrix, from the couplings t.
  template <bool writes>
  static __device__ __noinline__ void unmix(const Tile at, const T* w, const T* gz, T* gt, const T* t, T* gw) {
    if constexpr (mul3 < warp / 2) unmix_pairs<writes>(at, w, gz, gt, t, gw);
    else unmix_columns<writes>(at, w, gz, gt, t, gw);
  }
  // Few channels: lanes are pairs, and then weights.
  template <bool writes>
  static EQ_FN void unmix_pairs(const Tile& at, const T* w, const T* gz, T* gt, const T* t, T* gw) {
    for (int p = at.lane; p < at.count; p += warp) {
      T sum[d3] = {};
#pragma unroll 4
      for (int c = 0; c < mul3; ++c) {
        const T value = weight(w, (at.first + p) * mul3 + c);
#pragma unroll
        for (int k = 0; k < d3; ++k) sum[k] += value * gz[k * mul3 + c];
      }
#pragma unroll
      for (int k = 0; k < d3; ++k) gt[k * tile + p] = sum[k];
    }
    if (!writes) return;
    for (int n = at.lane; n < at.count * mul3; n += warp) {
      const int p = n / mul3, c = n % mul3;
      T sum = 0;
#pragma unroll
      for (int k = 0; k < d3; ++k) sum += t[k * tile + p] * gz[k * mul3 + c];
      gw[at.first * mul3 + n] = sum;
    }
  }
  // Lanes are channels, and some pairs are taken at a time, so that 32 sums over lanes take as many shuffles.
  template <bool writes>
  static EQ_FN void unmix_columns(const Tile& at, const T* w, const T* gz, T* gt, const T* t, T* gw) {
    constexpr int together = warp / d3;
#pragma unroll 1
    for (int begin = 0; begin < at.count; begin += together) {
      T sum[warp] = {};
#pragma unroll 1
      for (int c = at.lane; c < (mul3 + warp - 1) / warp * warp; c += warp) {
        const bool active = mul3 % warp == 0 || c < mul3;
        T g[d3];
#pragma unroll
        for (int k = 0; k < d3; ++k) g[k] = active ? gz[k * mul3 + c] : T(0);
#pragma unroll
        for (int q = 0; q < together; ++q) {
          const int p = min(begin + q, at.count - 1), n = (at.first + p) * mul3 + c;
          const T value = active ? weight(w, n) : T(0);
          T gradient = 0;
#pragma unroll
          for (int k = 0; k < d3; ++k) {
            sum[q * d3 + k] += value * g[k];
            if (writes) gradient += t[k * tile + p] * g[k];
          }
          if (writes && active && begin + q < at.count) gw[n] = gradient;
        }
      }
      add_over_lanes<warp, warp / 2>(sum, at.lane);
      const int q = at.lane / d3, k = at.lane % d3;
      if (q < together && begin + q < at.count) gt[k * tile + begin + q] = sum[0];
    }
  }
};

// A path on a tile of pairs.
template <class P, class S>
struct PairTile {
  typedef PairLayout<P> L;
  typedef typename S::Coupling C;
  typedef PairsOf<S> Pairs;
  static constexpr int d1 = C::d1, d2 = C::d2, d3 = C::d3, tile = L::tile, mul3 = S::mul3;
  // Whether a lane's pairs have channels of x, or of y, that no other pair has; and whether y is the same for all.
  static constexpr bool one_v = Pairs::all && S::mul2 == 1, own_u = one_v || Pairs::equal, own_v = Pairs::equal;

  T* const shared;
  const int lane, first, count;
  const PairRows& rows;
  const PathPlace& at;

  static EQ_FN int2 channels(int pair) {
    if (Pairs::all) return make_int2(pair / S::mul2, pair % S::mul2);
    if (Pairs::equal) return make_int2(pair, pair);
    int u = 0;
    for (; pair >= S::mul1 - 1 - u; ++u) pair -= S::mul1 - 1 - u;
    return make_int2(u, u + 1 + pair);
  }
  EQ_FN void load_x(const T* row, int u, T* x) const {
#pragma unroll
    for (int i = 0; i < d1; ++i) x[i] = row[at.x + i * S::mul1 + u];
  }
  EQ_FN void load_y(const T* row, int v, T* y) const {
#pragma unroll
    for (int j = 0; j < d2; ++j) y[j] = row[at.y + v * d2 + j];
  }
  template <int n>
  EQ_FN void put(int array, int p, const T* values) const {
#pragma unroll
    for (int k = 0; k < n; ++k) shared[array + k * tile + p] = values[k];
  }
  EQ_FN T weight(const T* row, int n) const { return S::weighted ? row[at.w + n] : T(1); }

  EQ_FN void couple() const {
    for (int p = lane; p < count; p += warp) {
      const int2 uv = channels(first + p);
      T x[d1], y[d2], t[d3] = {};
      load_x(rows.x, uv.x, x);
      load_y(rows.y, uv.y, y);
      C::to_z(x, y, t);
      put<d3>(L::t, p, t);
      if constexpr (has_tangents) {
        T a[d1], b[d2], ta[d3] = {};
        load_x(rows.a, uv.x, a);
        load_y(rows.b, uv.y, b);
        C::to_z(a, y, ta);
        C::to_z(x, b, ta);
        put<d3>(L::ta, p, ta);
      }
    }
  }

  // ---- mixing with a weight for each pair: lanes are channels of the output, or pairs
  EQ_FN void mix_pairs(const T* w, int array) const {
    constexpr int end = S::mixing == own_channels ? Pairs::count : mul3;
    for (int c = lane; c < end; c += warp) {
      int from = c, to = c + 1, step = 1;  // the pairs that are added up
      if (S::mixing == over_v) {
        from = c * S::mul2;
        to = from + S::mul2;
      } else if (S::mixing == over_u) {
        to = Pairs::count;
        step = S::mul2;
      }
      if (from < first) from += (first - from + step - 1) / step * step;
      to = min(to, first + count);
      if (from >= to) continue;
      T sum[d3] = {};
      for (int n = from; n < to; n += step) {
        const T value = weight(w, n);
#pragma unroll
        for (int k = 0; k < d3; ++k) sum[k] += shared[array + k * tile + n - first] * value;
      }
#pragma unroll
      for (int k = 0; k < d3; ++k) rows.z[at.z + k * mul3 + c] += sum[k];
    }
  }
  template <bool writes>
  EQ_FN void unmix_pairs(const T* w, int array, int of) const {
    for (int p = lane; p < count; p += warp) {
      const int2 uv = channels(first + p);
      const int c = S::mixing == own_channels ? first + p : S::mixing == over_v ? uv.x : uv.y;
      const T value = weight(w, first + p);
      T gradient = 0;
#pragma unroll
      for (int k = 0; k < d3; ++k) {
        const T g = rows.gz[at.z + k * mul3 + c];
        shared[array + k * tile + p] = value * g;
        if (writes) gradient += shared[of + k * tile + p] * g;
      }
      if (writes) rows.gw[at.w + first + p] = gradient;
    }
  }

  typedef DenseMixing<tile, L::groups, d3, mul3, S::weighted> Dense;
  EQ_FN Tile here() const { return {shared, lane, first, count}; }
  EQ_FN void mix(const T* w, int array) const {
    if constexpr (S::mixing == dense) Dense::mix(here(), w + at.w, shared + array, rows.z + at.z);
    else mix_pairs(w, array);
  }
  template <bool writes>
  EQ_FN void unmix(const T* w, int array, int of) const {
    if constexpr (S::mixing == dense) {
      const T* const gz = rows.gz + at.z;
      Dense::template unmix<writes>(here(), w + at.w, gz, shared + array, shared + of, rows.gw + at.w);
    } else {
      unmix_pairs<writes>(w, array, of);
    }
  }

  // ---- gradients of x and y
  EQ_FN void uncouple() const {
    T of_all[power_of_two(d2)] = {};  // where y is the same for all pairs
    for (int p = lane; p < count; p += warp) {
      const int2 uv = channels(first + p);
      T x[d1], y[d2], g[d3], gx[d1] = {}, gy[d2] = {};
      load_x(has_tangents ? rows.a : rows.x, uv.x, x);
      load_y(has_tangents ? rows.b : rows.y, uv.y, y);
#pragma unroll
      for (int k = 0; k < d3; ++k) g[k] = shared[L::gt + k * tile + p];
      C::to_x(y, g, gx);
      C::to_y(x, g, gy);
      if constexpr (has_tangents && S::weighted) {
        load_x(rows.x, uv.x, x);
        load_y(rows.y, uv.y, y);
#pragma unroll
        for (int k = 0; k < d3; ++k) g[k] = shared[L::gtc + k * tile + p];
        C::to_x(y, g, gx);
        C::to_y(x, g, gy);
      }
      if constexpr (own_u) {
#pragma unroll
        for (int i = 0; i < d1; ++i) add_to(rows.gx + at.x + i * S::mul1 + uv.x, gx[i], rows.atomic);
      } else {
        put<d1>(L::gx, p, gx);
      }
#pragma unroll
      for (int j = 0; j < d2; ++j) {
        if (one_v) of_all[j] += gy[j];
        else if (own_v) rows.gy[at.y + uv.y * d2 + j] += gy[j];
        else shared[L::gy + j * tile + p] = gy[j];
      }
    }
    if constexpr (one_v) {
      constexpr int sums = power_of_two(d2), shift = 5 - log2_of(sums);
      add_over_lanes<sums, warp / 2>(of_all, lane);
      const int j = lane >> shift;
      if ((lane & ((1 << shift) - 1)) == 0 && j < d2) rows.gy[at.y + j] += of_all[0];
    }
    if constexpr (!own_u) {
      __syncthreads();
      for (int n = lane; n < d1 * S::mul1; n += warp) {
        const int i = n / S::mul1, u = n % S::mul1;
        T sum = 0;
        for (int v = Pairs::first_v(u); v < Pairs::end_v(u); ++v) sum += of_pair(L::gx + i * tile, u, v);
        add_to(rows.gx + at.x + n, sum, rows.atomic);
      }
    }
    if constexpr (!own_v && !one_v) {
      for (int n = lane; n < d2 * S::mul2; n += warp) {
        const int v = n / d2, j = n % d2;
        T sum = 0;
        for (int u = Pairs::first_u(v); u < Pairs::end_u(v); ++u) sum += of_pair(L::gy + j * tile, u, v);
        rows.gy[at.y + n] += sum;
      }
    }
  }
  EQ_FN T of_pair(int array, int u, int v) const {
    const int p = Pairs::at(u, v) - first;
    return p >= 0 && p < count ? shared[array + p] : T(0);
  }

  EQ_FN void run() const {
    couple();
    __syncthreads();
    if constexpr (!has_gradient) {
      mix(rows.w, L::t);
    } else {
      unmix<S::weighted>(rows.w, L::gt, has_tangents ? L::ta : L::t);
      if constexpr (has_tangents) {
        mix(rows.w, L::ta);
        if constexpr (S::weighted) {
          unmix<false>(rows.c, L::gtc, L::t);
          mix(rows.c, L::t);
        }
      }
      __syncthreads();
      uncouple();
    }
    __syncthreads();
  }
};

template <class P>
struct PairWorker {
  typedef PairLayout<P> L;
  const eq_operands& o;
  const eq_work_split& split;
  const BlockRange& range;
  T* const shared;
  const int lane;
  PairRows rows;

  EQ_FN PairWorker(const eq_operands& o_, const eq_work_split& split_, const BlockRange& range_, T* shared_)
      : o(o_), split(split_), range(range_), shared(shared_), lane(threadIdx.x) {}

  EQ_FN void clear(T* row, int dim) const {
    for (int n = lane; n < dim; n += warp) row[n] = 0;
  }
  EQ_FN void begin(int receiver) {
    if (has_gradient) rows.gz = static_cast<const T*>(o.gz) + int64_t(receiver) * P::z_dim;
    if (!writes_z) return;
    rows.z = P::rows_shared ? shared + L::z_sum : range.target(split, static_cast<T*>(o.z), receiver, P::z_dim);
    clear(rows.z, P::z_dim);
    __syncthreads();
  }
  EQ_FN void finish(int receiver) const {
    if (!writes_z || !P::rows_shared) return;
    T* const to = range.target(split, static_cast<T*>(o.z), receiver, P::z_dim);
    for (int n = lane; n < P::z_dim; n += warp) to[n] = rows.z[n];
    __syncthreads();
  }

  EQ_FN void run_edge(int slot) {
    const int64_t edge = o.row_ptr ? o.edge[slot] : slot, sender = o.row_ptr ? o.sender[slot] : slot;
    rows.x = static_cast<const T*>(o.x) + sender * P::x_dim;
    rows.y = static_cast<const T*>(o.y) + edge * P::y_dim;
    rows.w = static_cast<const T*>(o.w) + edge * o.w_stride;
    T *gx = nullptr, *gy = nullptr;
    if (has_tangents) {
      rows.a = static_cast<const T*>(o.a) + sender * P::x_dim;
      rows.b = static_cast<const T*>(o.b) + edge * P::y_dim;
      rows.c = static_cast<const T*>(o.c) + edge * o.c_stride;
    }
    if (has_gradient) {
      // Each edge has a row for its gradient of x, unless all add to those of the senders.
      T* const all = static_cast<T*>(o.row_ptr && o.deterministic ? o.workspace : o.gx);
      gx = all + (o.deterministic ? int64_t(slot - split.first) : sender) * P::x_dim;
      if (!o.row_ptr) gx = all + sender * P::x_dim;
      gy = static_cast<T*>(o.gy) + edge * P::y_dim;
      rows.gw = static_cast<T*>(o.gw) + edge * P::w_dim;
      rows.gx = P::rows_shared ? shared + L::gx_sum : gx;
      rows.gy = P::rows_shared ? shared + L::gy_sum : gy;
      rows.atomic = !P::rows_shared && !o.deterministic;
      if (!rows.atomic) clear(rows.gx, P::x_dim);
      clear(rows.gy, P::y_dim);
      __syncthreads();
    }
    P::each_shape([&](auto shape) {
      typedef decltype(shape) S;
#pragma unroll 1
      for (int n = 0; n < S::paths; ++n) {
        const PathPlace at = S::place(n);
#pragma unroll 1
        for (int first = 0; first < PairsOf<S>::count; first += L::tile)
          PairTile<P, S>{shared, lane, first, min(L::tile, PairsOf<S>::count - first), rows, at}.run();
      }
    });
    if (has_gradient && P::rows_shared) {
      for (int n = lane; n < P::x_dim; n += warp) {
        if (o.deterministic) gx[n] = rows.gx[n];
        else atomicAdd(gx + n, rows.gx[n]);
      }
      for (int n = lane; n < P::y_dim; n += warp) gy[n] = rows.gy[n];
      __syncthreads();
    }
  }
};

template <class P>
EQ_FN void run_pairs(const eq_operands& o, const eq_work_split& split, T* shared) {
  let_next_begin();
  const BlockRange range(receivers_of(o), split, blockIdx.x, split.first, split.last);
  if (!range.exists) return;
  PairWorker<P> worker(o, split, range, shared);
  int receiver = range.row, end = range.rows.end(receiver);
  worker.begin(receiver);
#pragma unroll 1
  for (int slot = range.first; slot < range.last; ++slot) {
    while (slot >= end) {
      worker.finish(receiver++);
      end = range.rows.end(receiver);
      worker.begin(receiver);
    }
    worker.run_edge(slot);
  }
  worker.finish(receiver);
}

// What the kernels that move and add whole rows need of a problem.
template <class P>
struct WithBlocks : P {
  template <class Rows, class F>
  static EQ_FN void each_block(const F& run) {
#pragma unroll
    for (int n = 0; n < Rows::count; ++n) run(Rows::block(n).offset, Rows::block(n).mul, Rows::block(n).dim);
  }
  template <class F>
  static EQ_FN void each_x_block(const F& run) {
    each_block<typename P::X>(run);
  }
  template <class F>
  static EQ_FN void each_z_block(const F& run) {
    each_block<typename P::Z>(run);
  }
};

}  // namespace

#define EQ_EXPORT_PAIRS(P)                                                                                             \
  EQ_KERNEL void __launch_bounds__(warp)                                                                               \
      eq_main_0(const EQ_PARAMETER eq_operands o, const EQ_PARAMETER eq_work_split split) {                            \
    static_assert(PairLayout<P>::bytes == P::shared_bytes, "the plan and the layout count shared memory alike");       \
    extern __shared__ __align__(128) unsigned char shared[];                                                           \
    run_pairs<P>(o, split, reinterpret_cast<T*>(shared));                                                              \
  }                                                                                                                    \
  EQ_EXPORT(WithBlocks<P>)

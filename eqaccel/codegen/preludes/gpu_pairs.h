// GPU prelude of tensor products of any mode: a block is a warp, which takes some edges at a time.
//
// Where pairs of channels are coupled, each edge has as many lanes, which take one of its pairs after another. Where a
// dense matrix mixes them, a team of lanes has the channels of the output of an edge (gpu_mixing.h). In between
// couplings are in shared memory, a tile of pairs at a time. What is added up over the paths of an edge is in shared
// memory too, or in device memory if it does not fit. One lane adds to each sum, in a fixed order where `deterministic`
// asks for it.
#pragma once
#include "gpu.h"
#include "gpu_mixing.h"
#include "gpu_whole_pairs.h"
#include "pairs.h"

namespace {

EQ_FN void add_to(T* sum, T value, bool atomic) {
  if (atomic) atomicAdd(sum, value);
  else *sum += value;
}

// Runs on numbers before `end`, each `step` from the last one. With paths that mix densely a GPU waits for instructions
// more than for rows: such kernels have the loop once. Others are small, and wait for rows.
template <class L, class F>
EQ_FN void each_number(int first, int end, int step, const F& run) {
  if constexpr (L::has_matrices) {
#pragma unroll 1
    for (int n = first; n < end; n += step) run(n);
  } else {
    for (int n = first; n < end; n += step) run(n);
  }
}

// A path on a tile of pairs. All but dense mixing is done by the lanes of an edge for themselves.
template <class Worker, class S>
struct PairTile {
  typedef typename Worker::Problem P;
  typedef PairLayout<P> L;
  typedef typename S::Coupling C;
  typedef PairsOf<S> Pairs;
  static constexpr int d1 = C::d1, d2 = C::d2, d3 = C::d3, mul1 = S::mul1, mul2 = S::mul2, mul3 = S::mul3;
  static constexpr int lanes = L::lanes, most = S::Mixing::tile;
  static_assert(most * d3 <= L::span, "the couplings of a tile fit their array");
  // Whether y is the same for all pairs, and whether each has channels of x and y that no other has.
  static constexpr bool one_v = Pairs::all && mul2 == 1, own = Pairs::equal;

  Worker& worker;
  const int lane, first, count;
  const bool active;  // whether there is an edge for this lane
  const PathPlace& at;

  static EQ_FN int2 channels(int pair) {
    if (Pairs::all) return make_int2(pair / mul2, pair % mul2);
    if (Pairs::equal) return make_int2(pair, pair);
    int u = 0;
    for (; pair >= mul1 - 1 - u; ++u) pair -= mul1 - 1 - u;
    return make_int2(u, u + 1 + pair);
  }
  EQ_FN InBlock<mul1, d1> in_x() const { return {worker.o.mul_ir != 0}; }
  EQ_FN InBlock<mul3, d3> in_z() const { return {worker.o.mul_ir != 0}; }
  EQ_FN void load_x(const T* row, int u, T* x) const {
    in_x().each(u, [&](int i, int n) { x[i] = row[at.x + n]; });
  }
  EQ_FN void load_y(const T* row, int v, T* y) const {
#pragma unroll
    for (int j = 0; j < d2; ++j) y[j] = row[at.y + v * d2 + j];
  }
  // A pair of this lane's edge in one of the arrays of couplings.
  EQ_FN T* coupling(int array, int p) const { return worker.shared + array + lane / lanes * L::span + p * d3; }
  EQ_FN T weight(const T* row, int n) const { return S::weighted ? row[at.w + n] : T(1); }

  // Rows are not kept from one step to the next: they would take many registers in between.
  EQ_FN void couple() const {
    if (!active) return;
    const PairRows rows = worker.rows(lane);
    each_number<L>(lane % lanes, count, lanes, [&](int p) {
      const int2 uv = channels(first + p);
      T x[d1], y[d2], t[d3] = {};
      load_x(rows.x, uv.x, x);
      load_y(rows.y, uv.y, y);
      C::to_z(x, y, t);
      put<d3>(coupling(L::t, p), t);
      if constexpr (has_tangents) {
        T a[d1], b[d2], ta[d3] = {};
        load_x(rows.a, uv.x, a);
        load_y(rows.b, uv.y, b);
        C::to_z(a, y, ta);
        C::to_z(x, b, ta);
        put<d3>(coupling(L::ta, p), ta);
      }
    });
  }

  // ---- mixing with a weight for each pair: lanes are channels of the output, or pairs
  EQ_FN void mix_pairs(const PairRows& rows, const T* w, int array) const {
    constexpr int end = S::mixing == own_channels ? Pairs::count : mul3;
    for (int c = lane % lanes; c < end; c += lanes) {
      int from = c, to = c + 1, step = 1;  // the pairs that are added up
      if (S::mixing == over_v) {
        from = c * mul2;
        to = from + mul2;
      } else if (S::mixing == over_u) {
        to = Pairs::count;
        step = mul2;
      }
      if (from < first) from += (first - from + step - 1) / step * step;
      to = min(to, first + count);
      if (from >= to) continue;
      T sum[d3] = {};
      for (int n = from; n < to; n += step) {
        const T value = weight(w, n), *const t = coupling(array, n - first);
#pragma unroll
        for (int k = 0; k < d3; ++k) sum[k] += t[k] * value;
      }
      in_z().each(c, [&](int k, int n) { rows.z[at.z + n] += sum[k]; });
    }
  }
  // Transposed; with `writes` also the gradient of the weights, from couplings.
  template <bool writes>
  EQ_FN void unmix_pairs(const PairRows& rows, const T* w, int array, int of) const {
    for (int p = lane % lanes; p < count; p += lanes) {
      const int2 uv = channels(first + p);
      const int c = S::mixing == own_channels ? first + p : S::mixing == over_v ? uv.x : uv.y;
      const T value = weight(w, first + p), *const t = coupling(of, p);
      T *const gt = coupling(array, p), gradient = 0;
      in_z().each(c, [&](int k, int n) {
        const T g = rows.gz[at.z + n];
        gt[k] = value * g;
        if (writes) gradient += t[k] * g;
      });
      if (writes) rows.gw[at.w + first + p] = gradient;
    }
  }

  EQ_FN void mix() const {
    if constexpr (S::mixing == dense) {
      typedef typename S::Mixing::Code Code;
      const Tile tile{worker.shared, lane, first, count, S::Mixing::chunk};
      const MixedRows rows = worker.mixed(at);
      if constexpr (S::Mixing::whole_pairs) worker.next = mix_whole_pairs<L, d3, mul3>(tile, rows, worker.next);
      else worker.next = mix_densely<L, Code, d3, mul3, S::weighted>(tile, rows, worker.next);
    } else if (active) {
      const PairRows rows = worker.rows(lane);
      if constexpr (has_gradient) unmix_pairs<S::weighted>(rows, rows.w, L::gt, has_tangents ? L::ta : L::t);
      if constexpr (writes_z) mix_pairs(rows, rows.w, has_tangents ? L::ta : L::t);
      if constexpr (has_tangents && S::weighted) {
        unmix_pairs<false>(rows, rows.c, L::gtc, L::t);
        mix_pairs(rows, rows.c, L::t);
      }
    }
  }

  // ---- gradients of x and y: first lanes are channels of x, and where channels of y have several pairs, then of y
  template <bool of_x, bool of_y>
  EQ_FN void uncouple_pair(const PairRows& rows, int u, int v, T* gx, T* gy) const {
    T x[d1], y[d2], g[d3];
    const int p = Pairs::at(u, v) - first;
    if (p < 0 || p >= count) return;
    const auto add = [&](const T* x_row, const T* y_row, int array) {
#pragma unroll
      for (int k = 0; k < d3; ++k) g[k] = coupling(array, p)[k];
      if constexpr (of_x) {
        load_y(y_row, v, y);
        C::to_x(y, g, gx);
      }
      if constexpr (of_y) {
        load_x(x_row, u, x);
        C::to_y(x, g, gy);
      }
    };
    add(has_tangents ? rows.a : rows.x, has_tangents ? rows.b : rows.y, L::gt);
    if constexpr (has_tangents && S::weighted) add(rows.x, rows.y, L::gtc);
  }
  EQ_FN void uncouple() const {
    const PairRows rows = worker.rows(lane);
    T of_all[d2] = {};  // where y is the same for all pairs
    const int u_end = active ? mul1 : 0, v_end = active ? mul2 : 0;
    each_number<L>(lane % lanes, u_end, lanes, [&](int u) {
      T gx[d1] = {};
      for (int v = Pairs::first_v(u); v < Pairs::end_v(u); ++v) uncouple_pair<true, one_v>(rows, u, v, gx, of_all);
      in_x().each(u, [&](int i, int n) { add_to(rows.gx + at.x + n, gx[i], rows.atomic); });
    });
    if constexpr (one_v) {
      const TeamSums<d2, lanes> sums(of_all, lane);
      if (active) sums.each([&](int j, T sum) { rows.gy[at.y + j] += sum; });
    } else {
      each_number<L>(lane % lanes, v_end, lanes, [&](int v) {
        T gy[d2] = {};
        for (int u = Pairs::first_u(v); u < Pairs::end_u(v); ++u) uncouple_pair<false, true>(rows, u, v, nullptr, gy);
#pragma unroll
        for (int j = 0; j < d2; ++j) rows.gy[at.y + v * d2 + j] += gy[j];
      });
    }
  }

  EQ_FN void run() const {
    couple();
    __syncthreads();
    mix();
    __syncthreads();
    if constexpr (has_gradient) {
      uncouple();
      __syncthreads();
    }
  }
};

template <class P>
struct PairWorker {
  typedef P Problem;
  typedef PairLayout<P> L;
  const eq_operands& o;
  const eq_work_split& split;
  const BlockRange& range;
  T* const shared;
  const int lane;
  int* const ids;
  int first, count;  // the slots that are taken together
  int row;  // that the sum belongs to which is kept from edge to edge
  int groups = 0;  // of edges that were taken
  NextChunk next{};

  EQ_FN PairWorker(const eq_operands& o_, const eq_work_split& split_, const BlockRange& range_, T* shared_)
      : o(o_), split(split_), range(range_), shared(shared_), lane(threadIdx.x), ids(L::numbers(shared_)),
        row(range_.row) {
    if (P::rows_shared) clear(shared + L::sums, L::edges * L::row);
    else if (writes_z) clear(z_row(row), P::z_dim);
#if EQ_BULK_COPY
    if constexpr (L::copies_rows) init_copies<L>(shared, lane);
#endif
    __syncthreads();
  }

  // Runs on the elements of a row that this lane has.
  template <class F>
  EQ_FN void each_element(int dim, const F& run) const {
    each_number<L>(lane, dim, warp, run);
  }
  EQ_FN void clear(T* to, int dim) const {
    each_element(dim, [&](int n) { to[n] = 0; });
  }
  EQ_FN int edge(int e) const { return ids[e]; }
  EQ_FN int sender(int e) const { return ids[L::edges + e]; }
  EQ_FN int receiver(int e) const { return ids[2 * L::edges + e]; }
  EQ_FN T* sums(int e) const { return shared + L::sums + e * L::row; }
  EQ_FN T* z_row(int of) const { return range.target(split, static_cast<T*>(o.z), of, P::z_dim); }
  EQ_FN T* gx_row(int e) const {
    // Each edge has a row for its gradient of x, unless all add to those of the senders.
    const bool own = o.row_ptr && o.deterministic;
    return static_cast<T*>(own ? o.workspace : o.gx) + (own ? int64_t(first + e - split.first) : sender(e)) * P::x_dim;
  }

  EQ_FN void find() {
    __syncthreads();
    if (lane < count) {
      ids[lane] = o.row_ptr ? o.edge[first + lane] : first + lane;
      ids[L::edges + lane] = o.row_ptr ? o.sender[first + lane] : first + lane;
    }
    int of = row;
    each_number<L>(0, count, 1, [&](int e) {
      while (range.rows.end(of) <= first + e) ++of;
      if (lane == 0) ids[2 * L::edges + e] = of;
    });
    __syncthreads();
  }

  // Leaves behind rows before `next`: the first one has the sum that an edge holds, others have no edges.
  EQ_FN void leave_rows(int next, int held) {
    for (; row < next; ++row) {
      T* const to = z_row(row);
      each_element(P::z_dim, [&](int n) {
        to[n] = sums(held)[n];
        sums(held)[n] = 0;
      });
    }
  }
  EQ_FN void begin(int next) {
    if (writes_z && P::rows_shared) leave_rows(next, 0);
    for (; writes_z && row < next; ++row) clear(z_row(row + 1), P::z_dim);
    row = next;
    __syncthreads();
  }
  // Adds up the rows of z of edges, in order. The first edge is left with the sum of the last receiver.
  EQ_FN void add_rows() {
    int held = 0;
    each_number<L>(1, count + 1, 1, [&](int e) {
      const int to = e < count ? e : 0;
      if (e < count) leave_rows(receiver(e), held);
      each_element(held != to ? P::z_dim : 0, [&](int n) {
        sums(to)[n] += sums(held)[n];
        sums(held)[n] = 0;
      });
      held = to;
    });
  }
  EQ_FN void write_gradients() const {
    each_number<L>(0, count, 1, [&](int e) {
      T *const of_x = sums(e) + L::gx_sum, *const of_y = sums(e) + L::gy_sum, *const gx = gx_row(e);
      T* const gy = static_cast<T*>(o.gy) + int64_t(edge(e)) * P::y_dim;
      each_element(P::x_dim, [&](int n) {
        if (o.deterministic) gx[n] = of_x[n];
        else atomicAdd(gx + n, of_x[n]);
        of_x[n] = 0;
      });
      each_element(P::y_dim, [&](int n) {
        gy[n] = of_y[n];
        of_y[n] = 0;
      });
    });
  }

  // The rows of edge e, those that are read in device memory.
  EQ_FN PairRows rows_of(int e) const {
    PairRows rows;
    const int64_t of = edge(e), from = sender(e);
    rows.x = static_cast<const T*>(o.x) + from * P::x_dim;
    rows.y = static_cast<const T*>(o.y) + of * P::y_dim;
    rows.w = static_cast<const T*>(o.w) + of * o.w_stride;
    rows.z = P::rows_shared ? sums(e) : z_row(row);
    if (has_tangents) {
      rows.a = static_cast<const T*>(o.a) + from * P::x_dim;
      rows.b = static_cast<const T*>(o.b) + of * P::y_dim;
      rows.c = static_cast<const T*>(o.c) + of * o.c_stride;
    }
    if (has_gradient) {
      rows.gz = static_cast<const T*>(o.gz) + int64_t(receiver(e)) * P::z_dim;
      rows.gw = static_cast<T*>(o.gw) + of * P::w_dim;
      rows.gx = P::rows_shared ? sums(e) + L::gx_sum : gx_row(e);
      rows.gy = P::rows_shared ? sums(e) + L::gy_sum : static_cast<T*>(o.gy) + of * P::y_dim;
      rows.atomic = !P::rows_shared && !o.deterministic;
    }
    return rows;
  }
  // The rows of a lane's edge, as they are read.
  EQ_FN PairRows rows(int lane) const {
    const int e = min(lane / L::lanes, count - 1);
    PairRows rows = rows_of(e);
    if constexpr (L::copies_rows)
      each_copied_row<L>(rows,
                         [&](const T*& from, CopiedRow row, int, int, bool) { from = copied_row<L>(shared, e, row); });
    return rows;
  }
  EQ_FN EdgeWeights weights() const {
    return {static_cast<const T*>(o.w), static_cast<const T*>(o.c), o.w_stride, o.c_stride, count,
            !has_gradient && o.row_ptr};
  }
  EQ_FN MixedRows mixed(const PathPlace& at) const {
    return {weights(),
            static_cast<const T*>(o.gz),
            P::rows_shared ? nullptr : z_row(row),
            static_cast<T*>(o.gw),
            at.w,
            at.z,
            o.mul_ir != 0};
  }

  // Asks for what the edges read, where it is copied.
  EQ_FN void start_copies() {
#if EQ_BULK_COPY
    if constexpr (L::copies_rows) {
      if (lane < L::edges) copy_rows<L>(shared, lane, lane < count, rows_of(min(lane, count - 1)));
      if constexpr (L::copies_chunks) copy_first_chunks<L>(shared, lane, weights(), next);
    }
#endif
  }
  EQ_FN void wait_for_rows() {
#if EQ_BULK_COPY
    if constexpr (L::copies_rows) wait_barrier(barrier<L>(shared, L::stages), groups++ & 1);
#endif
  }

  EQ_FN void run(int slot, int together) {
    first = slot;
    count = together;
    find();
    start_copies();
    begin(receiver(0));
    if (has_gradient && !P::rows_shared) {
      const PairRows rows = this->rows(lane);
      if (!rows.atomic) clear(rows.gx, P::x_dim);
      clear(rows.gy, P::y_dim);
      __syncthreads();
    }
    wait_for_rows();
    P::each_shape([&](auto shape) {
      typedef decltype(shape) S;
      typedef PairTile<PairWorker, S> PathTile;
#pragma unroll 1
      for (int n = 0; n < S::paths; ++n) {
        const PathPlace at = S::place(n);
#pragma unroll 1
        for (int pair = 0; pair < PairsOf<S>::count; pair += PathTile::most) {
          const int pairs = min(PathTile::most, PairsOf<S>::count - pair);
          PathTile{*this, lane, pair, pairs, lane / L::lanes < count, at}.run();
        }
      }
    });
    if (!P::rows_shared) return;
    if (has_gradient) write_gradients();
    if (writes_z) add_rows();
  }
  EQ_FN void finish() const {
    if (!writes_z || !P::rows_shared) return;
    each_element(P::z_dim, [&](int n) { z_row(row)[n] = sums(0)[n]; });
  }
};

template <class P>
EQ_FN void run_pairs(const eq_operands& o, const eq_work_split& split, T* shared) {
  constexpr int edges = PairLayout<P>::edges;
  let_next_begin();
  const BlockRange range(receivers_of(o), split, blockIdx.x, split.first, split.last, writes_z);
  if (!range.exists) return;
  PairWorker<P> worker(o, split, range, shared);
#pragma unroll 1
  for (int slot = range.first; slot < range.last; slot += edges) worker.run(slot, min(edges, range.last - slot));
  worker.finish();
}

// What the kernels that add whole rows need of a problem: its own writes all columns.
template <class P>
struct WholeRows : P {
  static constexpr bool moves_gx = false;
  static EQ_FN bool reads_x(int) { return true; }
};

}  // namespace

#define EQ_EXPORT_PAIRS(P)                                                                                             \
  EQ_KERNEL void __launch_bounds__(warp, EQ_RESIDENT(P::warps))                                                        \
      eq_main_0(const EQ_PARAMETER eq_operands o, const EQ_PARAMETER eq_work_split split) {                            \
    static_assert(                                                                                                     \
        PairLayout<P>::bytes == P::shared_bytes || (!EQ_BULK_COPY && PairLayout<P>::bytes < P::shared_bytes),          \
        "the plan and the layout count shared memory alike");                                                          \
    extern __shared__ __align__(128) unsigned char shared[];                                                           \
    run_pairs<P>(o, split, reinterpret_cast<T*>(shared));                                                              \
  }                                                                                                                    \
  EQ_EXPORT_SUMS(WholeRows<P>)

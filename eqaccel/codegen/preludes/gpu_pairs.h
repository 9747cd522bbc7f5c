// GPU prelude of tensor products of any mode: a block is a warp, which takes some edges at a time.
//
// Where pairs of channels are coupled, each edge has as many lanes, which take one of its pairs after another. Where pairs
// are channels of the output, that is all (gpu_pair_path.h). Where a dense matrix mixes them, a team of lanes has the
// channels of the output of an edge (gpu_mixing.h). In between couplings are in shared memory, a tile of pairs at a time.
// What is added up over the paths of an edge is in shared memory too, or in device memory if it does not fit. One lane
// adds to each sum, in a fixed order where `deterministic` asks for it.
#pragma once
#include "gpu.h"
#include "gpu_mixing.h"
#include "gpu_pair_path.h"
#include "gpu_whole_pairs.h"
#include "pairs.h"

namespace {

// A path on a tile of pairs. All but dense mixing is done by the lanes of an edge for themselves.
template <class Worker, class S>
struct PairTile : PairPath<Worker, S> {
  typedef PairPath<Worker, S> Path;
  typedef typename Path::L L;
  typedef typename Path::Pairs Pairs;
  using Path::d3, Path::mul2, Path::mul3, Path::lanes, Path::worker, Path::lane, Path::active, Path::at;
  static constexpr int most = S::Mixing::tile;
  static_assert(most * d3 <= L::span, "the couplings of a tile fit their array");

  const int first, count;

  EQ_FN PairTile(Worker& worker_, const PathPlace& at_, int first_)
      : Path(worker_, at_), first(first_), count(min(most, Pairs::count - first_)) {}

  // A pair of this lane's edge in one of the arrays of couplings.
  EQ_FN T* coupling(int array, int p) const {
    return worker.shared + array + worker.lane / lanes * L::span + (p - first) * d3;
  }

  // Rows are not kept from one step to the next: they would take many registers in between.
  EQ_FN void couple_all() const {
    if (!active) return;
    const PairRows rows = worker.rows(worker.lane);
    each_number<L>(first + lane, first + count, lanes, [&](int p) {
      T t[d3] = {}, ta[d3] = {};
      Path::couple(rows, Path::channels(p), t, ta);
      put<d3>(coupling(L::t, p), t);
      if constexpr (has_tangents) put<d3>(coupling(L::ta, p), ta);
    });
  }

  // ---- mixing with a weight for each pair: lanes are channels of the output, or pairs
  EQ_FN void mix_pairs(const PairRows& rows, const T* w, int array) const {
    constexpr bool is_over_v = S::mixing == over_v;
    for (int c = lane; c < mul3; c += lanes) {
      // The pairs that are added up.
      int from = is_over_v ? c * mul2 : c, to = is_over_v ? from + mul2 : Pairs::count;
      constexpr int step = is_over_v ? 1 : mul2;
      if (from < first) from += (first - from + step - 1) / step * step;
      to = min(to, first + count);
      if (from >= to) continue;
      T sum[d3] = {};
      for (int p = from; p < to; p += step) {
        const T value = Path::weight(w, p), *const t = coupling(array, p);
#pragma unroll
        for (int k = 0; k < d3; ++k) sum[k] += t[k] * value;
      }
      Path::in_z().each(c, [&](int k, int n) { rows.z[at.z + n] += sum[k]; });
    }
  }
  // Transposed; with `writes` also the gradient of the weights, from couplings.
  template <bool writes>
  EQ_FN void unmix_pairs(const PairRows& rows, const T* w, int array, int of) const {
    for (int p = first + lane; p < first + count; p += lanes) {
      const int2 uv = Path::channels(p);
      const T value = Path::weight(w, p), *const t = coupling(of, p);
      T *const gt = coupling(array, p), gradient = 0;
      Path::in_z().each(S::mixing == over_v ? uv.x : uv.y, [&](int k, int n) {
        const T g = rows.gz[at.z + n];
        gt[k] = value * g;
        if (writes) gradient += t[k] * g;
      });
      if (writes) rows.gw[at.w + p] = gradient;
    }
  }

  EQ_FN void mix() const {
    if constexpr (S::mixing == dense) {
      typedef typename S::Mixing::Code Code;
      const Tile tile{worker.shared, worker.lane, first, count, S::Mixing::chunk};
      const MixedRows rows = worker.mixed(at);
      if constexpr (S::Mixing::whole_pairs) worker.next = mix_whole_pairs<L, d3, mul3>(tile, rows, worker.next);
      else worker.next = mix_densely<L, Code, d3, mul3, S::weighted>(tile, rows, worker.next);
    } else if (active) {
      const PairRows rows = worker.rows(worker.lane);
      if constexpr (has_gradient) unmix_pairs<S::weighted>(rows, rows.w, L::gt, has_tangents ? L::ta : L::t);
      if constexpr (writes_z) mix_pairs(rows, rows.w, has_tangents ? L::ta : L::t);
      if constexpr (has_tangents && S::weighted) {
        unmix_pairs<false>(rows, rows.c, L::gtc, L::t);
        mix_pairs(rows, rows.c, L::t);
      }
    }
  }

  EQ_FN void run() const {
    couple_all();
    __syncthreads();
    mix();
    __syncthreads();
    if constexpr (has_gradient) {
      Path::uncouple(
          worker.rows(worker.lane), first, first + count, [&](int p, T* g) { put<d3>(g, coupling(L::gt, p)); },
          [&](int p, T* g) { put<d3>(g, coupling(L::gtc, p)); });
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
    else if (writes_z && !P::stores_z) clear(z_row(row), P::z_dim);
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
    if (L::adds_z) leave_rows(next, 0);
    for (; writes_z && row < next; ++row) {
      if (P::stores_z) clear_empty_row();
      else clear(z_row(row + 1), P::z_dim);
    }
    row = next;
    __syncthreads();
  }
  // Where edges store z, a row without any is left to be cleared.
  EQ_FN void clear_empty_row() const {
    if (range.rows.begin(row) == range.rows.end(row)) clear(z_row(row), P::z_dim);
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
    rows.z = L::adds_z ? sums(e) : z_row(row);
    rows.starts_z = first + e == max(range.first, range.rows.begin(row));
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
#pragma unroll 1
      for (int n = 0; n < S::paths; ++n) {
        const PathPlace at = S::place(n);
        if constexpr (S::mixing == own_channels) {
          OwnPairs<PairWorker, S>(*this, at).run();
        } else {
          typedef PairTile<PairWorker, S> PathTile;
#pragma unroll 1
          for (int pair = 0; pair < PairsOf<S>::count; pair += PathTile::most) PathTile(*this, at, pair).run();
        }
      }
    });
    if (P::rows_shared && has_gradient) write_gradients();
    if (L::adds_z) add_rows();
  }
  EQ_FN void finish() const {
    if (P::stores_z) clear_empty_row();
    if (L::adds_z) each_element(P::z_dim, [&](int n) { z_row(row)[n] = sums(0)[n]; });
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

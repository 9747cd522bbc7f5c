// GPU prelude of tensor products of any mode: a path and an edge, as a lane sees them.
//
// Each edge has some lanes. Gradients of x and y are sums over pairs of channels: teams of lanes have the channels of y, as
// many at a time, and each team channels of x of its own, so that lanes side by side read pairs side by side.
#pragma once
#include "gpu_mixing.h"
#include "gpu_pair_rows.h"
#include "pairs.h"

namespace {

EQ_FN void add_to(T* sum, T value, bool atomic) {
  if (atomic) atomicAdd(sum, value);
  else *sum += value;
}

// Runs on numbers before `end`, each `step` from the last one. With paths that mix densely, and in double backward, a GPU
// waits for instructions more than for rows: such kernels have the loop once, and so have those that store z as they go,
// whose registers then leave room for more warps. Others are small, and wait for rows.
template <class L, class F>
EQ_FN void each_number(int first, int end, int step, const F& run) {
  if constexpr (L::has_matrices || has_tangents || L::Problem::stores_z) {
#pragma unroll 1
    for (int n = first; n < end; n += step) run(n);
  } else {
    for (int n = first; n < end; n += step) run(n);
  }
}

template <class Worker, class S>
struct PairPath {
  typedef typename Worker::Problem P;
  typedef PairLayout<P> L;
  typedef typename S::Coupling C;
  typedef PairsOf<S> Pairs;
  static constexpr int d1 = C::d1, d2 = C::d2, d3 = C::d3, mul1 = S::mul1, mul2 = S::mul2, mul3 = S::mul3;
  static constexpr int lanes = L::lanes, team = mul2 < lanes ? power_of_two(mul2) : lanes, teams = lanes / team;

  Worker& worker;
  const PathPlace& at;
  const int lane;
  const bool active;  // whether there is an edge for this lane

  EQ_FN PairPath(Worker& worker_, const PathPlace& at_)
      : worker(worker_), at(at_), lane(worker_.lane % lanes), active(worker_.lane / lanes < worker_.count) {}

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
  EQ_FN T weight(const T* row, int n) const { return S::weighted ? row[at.w + n] : T(1); }

  // The coupling of channels u and v, and with tangents how it varies.
  EQ_FN void couple(const PairRows& rows, int2 uv, T* t, T* ta) const {
    T x[d1], y[d2];
    load_x(rows.x, uv.x, x);
    load_y(rows.y, uv.y, y);
    C::to_z(x, y, t);
    if constexpr (has_tangents) {
      T a[d1], b[d2];
      load_x(rows.a, uv.x, a);
      load_y(rows.b, uv.y, b);
      C::to_z(a, y, ta);
      C::to_z(x, b, ta);
    }
  }

  // Adds the gradients of x and y that come from pairs first to last - 1. `gradient_of(p, g)` is that of the coupling of a
  // pair, and `tangent_of(p, g)` the one that varies with the tangent of its weight.
  template <class F, class G>
  EQ_FN void uncouple(const PairRows& rows, int first, int last, const F& gradient_of, const G& tangent_of) const {
    const auto add_pair = [&](int u, int p, const T* y, const T* b, T* gx, T* gy) {
      T x[d1], g[d3];
      gradient_of(p, g);
      C::to_x(has_tangents ? b : y, g, gx);
      load_x(has_tangents ? rows.a : rows.x, u, x);
      C::to_y(x, g, gy);
      if constexpr (has_tangents && S::weighted) {
        tangent_of(p, g);
        C::to_x(y, g, gx);
        load_x(rows.x, u, x);
        C::to_y(x, g, gy);
      }
    };
    const auto load_ys = [&](int v, T* y, T* b) {
      if (!has_tangents || S::weighted) load_y(rows.y, v, y);
      if constexpr (has_tangents) load_y(rows.b, v, b);
    };
    if constexpr (Pairs::equal || (Pairs::all && mul2 == 1)) {
      // Pairs are the channels of x. As a bound of the loop `active` would cost 14 registers.
      T gy[d2] = {};
      each_number<L>(first + lane, last, lanes, [&](int u) {
        if (!active) return;
        T y[d2], b[d2], gx[d1] = {};
        load_ys(Pairs::equal ? u : 0, y, b);
        add_pair(u, u, y, b, gx, gy);
        in_x().each(u, [&](int i, int n) { add_to(rows.gx + at.x + n, gx[i], rows.atomic); });
        if constexpr (Pairs::equal) {
#pragma unroll
          for (int j = 0; j < d2; ++j) {
            rows.gy[at.y + u * d2 + j] += gy[j];
            gy[j] = 0;
          }
        }
      });
      if constexpr (!Pairs::equal) {
        const TeamSums<d2, lanes> sums(gy, lane);
        if (active) sums.each([&](int j, T sum) { rows.gy[at.y + j] += sum; });
      }
    } else {
      const int first_u = channels(first).x, last_u = channels(last - 1).x;
      each_number<L>(0, mul2, team, [&](int first_v) {
        const int v = first_v + lane % team;
        const bool has_v = active && v < mul2;
        T y[d2], b[d2], gy[d2] = {};
        load_ys(min(v, mul2 - 1), y, b);
        each_number<L>(first_u, last_u + 1, teams, [&](int next_u) {
          const int u = next_u + lane / team, p = Pairs::at(u, v);
          const bool has_u = active && u <= last_u;
          T gx[d1] = {};
          if (has_u && has_v && v >= Pairs::first_v(u) && p >= first && p < last) add_pair(u, p, y, b, gx, gy);
          const TeamSums<d1, team> sums(gx, lane);
          if (has_u) sums.each([&](int i, T sum) { add_to(rows.gx + at.x + in_x().element(u, i), sum, rows.atomic); });
        });
        const TeamSums<d2, teams, team> sums(gy, lane);
        if (has_v) sums.each([&](int j, T sum) { rows.gy[at.y + v * d2 + j] += sum; });
      });
    }
  }
};

// A path whose pairs are channels of the output: couplings stay with the lanes that make them.
template <class Worker, class S>
struct OwnPairs : PairPath<Worker, S> {
  typedef PairPath<Worker, S> Path;
  typedef typename Path::P P;
  typedef typename Path::L L;
  using Path::d3, Path::lanes, Path::worker, Path::lane, Path::active, Path::at;
  static constexpr int pairs = Path::Pairs::count;

  EQ_FN OwnPairs(Worker& worker_, const PathPlace& at_) : Path(worker_, at_) {}

  EQ_FN void run() const {
    const PairRows rows = worker.rows(worker.lane);
    if constexpr (writes_z || S::weighted) couple_all(rows);
    if constexpr (has_gradient) {
      const auto weighted = [&](const T* w, int p, T* g) {
        const T value = Path::weight(w, p);
        Path::in_z().each(p, [&](int k, int n) { g[k] = value * rows.gz[at.z + n]; });
      };
      Path::uncouple(
          rows, 0, pairs, [&](int p, T* g) { weighted(rows.w, p, g); }, [&](int p, T* g) { weighted(rows.c, p, g); });
    }
    __syncthreads();
  }

 private:
  EQ_FN void couple_all(const PairRows& rows) const {
    each_number<L>(0, pairs, lanes, [&](int first) {
      const int p = first + lane;
      T z[d3];
      if (active && p < pairs) couple_one(rows, p, z);
      if constexpr (P::stores_z) store_z(rows, first, z);
    });
  }
  EQ_FN void couple_one(const PairRows& rows, int p, T* z) const {
    const T of_w = Path::weight(rows.w, p), of_c = has_tangents && S::weighted ? Path::weight(rows.c, p) : T(0);
    T t[d3] = {}, ta[d3] = {}, gradient = 0;
    Path::couple(rows, Path::channels(p), t, ta);
    Path::in_z().each(p, [&](int k, int n) {
      z[k] = has_tangents ? of_w * ta[k] + of_c * t[k] : of_w * t[k];
      if constexpr (writes_z && !P::stores_z) rows.z[at.z + n] += z[k];
      if constexpr (has_gradient && S::weighted) gradient += (has_tangents ? ta : t)[k] * rows.gz[at.z + n];
    });
    if constexpr (has_gradient && S::weighted) rows.gw[at.w + p] = gradient;
  }
  // Lanes with pairs from `first` on store their channels of z: side by side in memory, in either layout.
  EQ_FN void store_z(const PairRows& rows, int first, const T* z) const {
    static_assert(lanes == warp, "a warp has one edge");
    const auto put_z = [&](int n, T value) {
      T* const to = rows.z + at.z + n;
      *to = rows.starts_z ? value : *to + value;
    };
    const int count = min(lanes, pairs - first);
    if (d3 == 1 || !worker.o.mul_ir) {
      if (lane < count) Path::in_z().each(first + lane, [&](int k, int n) { put_z(n, z[k]); });
      return;
    }
    T* const staged = worker.shared + L::t;
    if (lane < count) put<d3>(staged + lane * d3, z);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < d3; ++k) {
      const int n = k * lanes + lane;
      if (n < count * d3) put_z(first * d3 + n, staged[n]);
    }
    __syncthreads();
  }
};

}  // namespace

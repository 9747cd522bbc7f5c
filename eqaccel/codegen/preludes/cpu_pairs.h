// CPU prelude of tensor products of any mode: a lane value is a SIMD vector of pairs, or of channels of the output.
//
// An edge is worked on path by path. Its rows are copied to memory of the thread in which each component begins a SIMD
// vector, and has zeros behind it; a coupling reads and writes arrays (component, pair). Weights are read where they are.
#pragma once
#include "cpu_padded.h"

namespace {

// ---- an edge

// What the paths of an edge work with; a direction has what it needs.
struct EdgeState {
  T *x, *y, *z, *a, *b, *gz, *gx, *gy;  // rows, padded
  T *xs, *ys, *t, *as, *bs, *ta, *gt, *gtc, *gxs, *gys;  // arrays (component, pair) of a path
  const T *w, *c;  // rows
  T* gw;
};

template <class S>
struct PathRun {
  typedef typename S::Coupling C;
  typedef PairsOf<S> Pairs;
  static constexpr int d1 = C::d1, d2 = C::d2, d3 = C::d3, pairs = Pairs::count, stride = padded(pairs);
  static constexpr int stride1 = padded(S::mul1), stride2 = padded(S::mul2), stride3 = padded(S::mul3);
  // Whether rows serve as arrays: in1 where each channel has one partner, and in2, whose values then are the same for all.
  static constexpr bool one_v = Pairs::all && S::mul2 == 1, direct = one_v || Pairs::equal;

  // ---- rows to arrays and back; the pairs of a channel u are neighbours in an array
  static EQ_FN const T* spread_u(const T* row, T* array) {
    if constexpr (direct) return row;
    for (int i = 0; i < d1; ++i) {
      T* to = array + i * stride;
      for (int u = 0; u < S::mul1; ++u) {
        const T value = row[i * stride1 + u];
        const int count = Pairs::end_v(u) - Pairs::first_v(u);
#pragma omp simd
        for (int v = 0; v < count; ++v) to[v] = value;
        to += count;
      }
      for (int p = pairs; p < stride; ++p) *to++ = 0;
    }
    return array;
  }
  static EQ_FN const T* spread_v(const T* row, T* array) {
    if constexpr (direct) return row;
    for (int j = 0; j < d2; ++j) {
      T* to = array + j * stride;
      for (int u = 0; u < S::mul1; ++u) {
        const int first = Pairs::first_v(u), count = Pairs::end_v(u) - first;
        memcpy(to, row + j * stride2 + first, count * sizeof(T));
        to += count;
      }
      for (int p = pairs; p < stride; ++p) *to++ = 0;
    }
    return array;
  }
  static EQ_FN void collect_u(const T* array, T* row) {
    for (int i = 0; i < d1; ++i) {
      const T* from = array + i * stride;
      for (int u = 0; u < S::mul1; ++u) {
        const int count = Pairs::end_v(u) - Pairs::first_v(u);
        Lane sum = {};
        int v = 0;
        for (; v + lanes <= count; v += lanes) sum += get(from + v);
        if (v < count) sum += load_first(from + v, count - v);
        row[i * stride1 + u] += sum_of(sum);
        from += count;
      }
    }
  }
  static EQ_FN void collect_v(const T* array, T* row) {
    for (int j = 0; j < d2; ++j) {
      const T* from = array + j * stride;
      for (int u = 0; u < S::mul1; ++u) {
        T* const to = row + j * stride2 + Pairs::first_v(u);
        const int count = Pairs::end_v(u) - Pairs::first_v(u);
        int v = 0;
        for (; v + lanes <= count; v += lanes) put(to + v, get(to + v) + get(from + v));
        if (v < count) store_first(to + v, count - v, load_first(to + v, count - v) + load_first(from + v, count - v));
        from += count;
      }
    }
  }

  // ---- couplings
  template <int count>
  static EQ_FN void get_all(const T* array, int p, Lane* values) {
#pragma GCC unroll 32
    for (int n = 0; n < count; ++n) values[n] = get(array + n * stride + p);
  }
  // The values of y of some pairs: one for all of them, or one each.
  typedef typename std::conditional<one_v, T, Lane>::type YValue;
  static EQ_FN void get_y(const T* y, int p, YValue* values) {
    if constexpr (one_v) {
      for (int j = 0; j < d2; ++j) values[j] = y[j * stride2];
    } else {
      get_all<d2>(y, p, values);
    }
  }
  // t = x y, or with `adds` t += x y.
  template <bool adds>
  static EQ_FN void couple(const T* x, const T* y, T* t) {
    for (int p = 0; p < stride; p += lanes) {
      Lane xs[d1], ts[d3] = {};
      get_all<d1>(x, p, xs);
      if (adds) get_all<d3>(t, p, ts);
      YValue ys[d2];
      get_y(y, p, ys);
      C::to_z(xs, ys, ts);
#pragma GCC unroll 32
      for (int k = 0; k < d3; ++k) put(t + k * stride + p, ts[k]);
    }
  }
  // Adds to gradients: gx += y gt, gy += x gt.
  static EQ_FN void uncouple(const T* x, const T* y, const T* gt, T* gx, T* gy) {
    Lane sums[d2] = {};
    for (int p = 0; p < stride; p += lanes) {
      Lane gs[d3], of_x[d1];
      get_all<d3>(gt, p, gs);
      get_all<d1>(gx, p, of_x);
      YValue ys[d2];
      get_y(y, p, ys);
      C::to_x(ys, gs, of_x);
#pragma GCC unroll 32
      for (int i = 0; i < d1; ++i) put(gx + i * stride + p, of_x[i]);
      Lane xs[d1];
      get_all<d1>(x, p, xs);
      if constexpr (one_v) {
        C::to_y(xs, gs, sums);
      } else {
        Lane of_y[d2];
        get_all<d2>(gy, p, of_y);
        C::to_y(xs, gs, of_y);
#pragma GCC unroll 32
        for (int j = 0; j < d2; ++j) put(gy + j * stride + p, of_y[j]);
      }
    }
    if constexpr (one_v) {
      for (int j = 0; j < d2; ++j) gy[j * stride2] += sum_of(sums[j]);
    }
  }

  // ---- mixing by a dense matrix (pair, channel)
  static constexpr int chunks = stride3 / lanes;
  static constexpr int sums = sizeof(Lane) == 64 ? 24 : 12;  // that registers hold
  static constexpr int together = sums / d3 < 1 ? 1 : sums / d3 < chunks ? sums / d3 : chunks;

  // Weights come from memory, once: they are fetched so many bytes ahead, which halves the time of large batches.
  static constexpr int ahead = 12288;
  static EQ_FN Lane weight(const T* w, int p, int c) {
    if constexpr (S::weighted) {
      __builtin_prefetch((const char*)(w + p * S::mul3 + c) + ahead, 0, 2);
      return get_part<S::mul3>(w + p * S::mul3, c);
    } else {
      return Lane{} + T(1);
    }
  }
  template <int first, int count>
  static EQ_FN void mix_columns(const T* w, const T* t, T* z) {
    // Sums of several pairs at a time: each would wait for its last multiply-add.
    constexpr int ways = count * d3 >= 6 ? 1 : count * d3 >= 3 ? 2 : 4;
    Lane acc[ways][count][d3] = {};
    const auto add = [&](int way, int p) {
#pragma GCC unroll 32
      for (int c = 0; c < count; ++c) {
        const Lane wv = weight(w, p, (first + c) * lanes);
#pragma GCC unroll 32
        for (int k = 0; k < d3; ++k) acc[way][c][k] += t[k * stride + p] * wv;
      }
    };
    int p = 0;
    for (; p + ways <= pairs; p += ways) {
#pragma GCC unroll 4
      for (int way = 0; way < ways; ++way) add(way, p + way);
    }
    for (; p < pairs; ++p) add(0, p);
#pragma GCC unroll 32
    for (int c = 0; c < count; ++c)
#pragma GCC unroll 32
      for (int k = 0; k < d3; ++k) {
        Lane sum = acc[0][c][k];
        for (int way = 1; way < ways; ++way) sum += acc[way][c][k];
        T* to = z + k * stride3 + (first + c) * lanes;
        put(to, get(to) + sum);
      }
  }
  template <int first = 0>
  static EQ_FN void mix_dense(const T* w, const T* t, T* z) {
    if constexpr (first < chunks) {
      constexpr int count = chunks - first < together ? chunks - first : together;
      mix_columns<first, count>(w, t, z);
      mix_dense<first + count>(w, t, z);
    }
  }
  // gt = transposed matrix times gz; with `writes` also the gradient of the matrix, from the pairs' t.
  template <bool writes>
  static EQ_FN void unmix_dense(const T* w, const T* gz, T* gt, const T* t, T* gw) {
    for (int p = 0; p < pairs; ++p) {
      Lane sum[d3] = {};
#pragma GCC unroll 4
      for (int n = 0; n < chunks; ++n) {
        const Lane wv = weight(w, p, n * lanes);
        Lane gradient = {};
#pragma GCC unroll 32
        for (int k = 0; k < d3; ++k) {
          const Lane g = get(gz + k * stride3 + n * lanes);
          sum[k] += wv * g;
          if (writes) gradient += t[k * stride + p] * g;
        }
        if (writes) put_part<S::mul3>(gw + p * S::mul3, n * lanes, gradient);
      }
#pragma GCC unroll 32
      for (int k = 0; k < d3; ++k) gt[k * stride + p] = sum_of(sum[k]);
    }
  }

  // ---- mixing with a weight for each pair: the pairs of each u are runs of neighbouring channels, or all pairs are one;
  // where pairs are added up over v, there is one v (`run_columns`)
  static constexpr bool own = S::mixing == own_channels || S::mixing == over_v;
  static constexpr int length = own ? pairs : S::mul2, runs = own ? 1 : S::mul1;

  static EQ_FN Lane pair_weight(const T* w, int run, int c) {
    if constexpr (S::weighted) return get_part<length>(w + run * length, c);
    else return Lane{} + T(1);
  }
  static EQ_FN void mix_pairs(const T* w, const T* t, T* z) {
    for (int run = 0; run < runs; ++run) {
      for (int c = 0; c < length; c += lanes) {
        const Lane wv = pair_weight(w, run, c);
#pragma GCC unroll 32
        for (int k = 0; k < d3; ++k) {
          T* const to = z + k * stride3 + c;
          put(to, get(to) + wv * get_part<length>(t + k * stride + run * length, c));
        }
      }
    }
  }
  template <bool writes>
  static EQ_FN void unmix_pairs(const T* w, const T* gz, T* gt, const T* t, T* gw) {
    for (int run = 0; run < runs; ++run) {
      for (int c = 0; c < length; c += lanes) {
        const Lane wv = pair_weight(w, run, c);
        Lane gradient = {};
#pragma GCC unroll 32
        for (int k = 0; k < d3; ++k) {
          const Lane g = get(gz + k * stride3 + c);
          put_part<length>(gt + k * stride + run * length, c, wv * g);
          if (writes) gradient += get_part<length>(t + k * stride + run * length, c) * g;
        }
        if (writes) put_part<length>(gw + run * length, c, gradient);
      }
    }
  }

  static EQ_FN void mix(const T* w, const T* t, T* z) {
    if constexpr (S::mixing == dense) mix_dense(w, t, z);
    else mix_pairs(w, t, z);
  }
  template <bool writes>
  static EQ_FN void unmix(const T* w, const T* gz, T* gt, const T* t, T* gw) {
    if constexpr (S::mixing == dense) unmix_dense<writes>(w, gz, gt, t, gw);
    else unmix_pairs<writes>(w, gz, gt, t, gw);
    for (int k = 0; k < d3; ++k)
      for (int p = pairs; p < stride; ++p) gt[k * stride + p] = 0;
  }

  // ---- a path of an edge, whose blocks begin there in padded rows
  // Pairs that are channels of the output as they are need no array of their own.
  static constexpr bool plain = own && !S::weighted;

  static __attribute__((noinline)) void run(const EdgeState& e, const PathPlace& at, int x_at, int y_at, int z_at) {
    const T *x = spread_u(e.x + x_at, e.xs), *y = spread_v(e.y + y_at, e.ys), *w = e.w + at.w;
    if constexpr (!has_gradient) {
      couple<plain>(x, y, plain ? e.z + z_at : e.t);
      if constexpr (!plain) mix(w, e.t, e.z + z_at);
    } else {
      const T* gz = e.gz + z_at;
      T *gx = direct ? e.gx + x_at : e.gxs, *gy = direct ? e.gy + y_at : e.gys;
      if (!direct) {
        memset(gx, 0, d1 * stride * sizeof(T));
        memset(gy, 0, d2 * stride * sizeof(T));
      }
      if constexpr (!has_tangents) {
        if (S::weighted) couple<false>(x, y, e.t);
        if constexpr (!plain) unmix<S::weighted>(w, gz, e.gt, e.t, e.gw + at.w);
        uncouple(x, y, plain ? gz : e.gt, gx, gy);
      } else {
        const T *a = spread_u(e.a + x_at, e.as), *b = spread_v(e.b + y_at, e.bs);
        T* const ta = plain ? e.z + z_at : e.ta;
        couple<plain>(a, y, ta);
        couple<true>(x, b, ta);
        if constexpr (!plain) {
          mix(w, ta, e.z + z_at);
          unmix<S::weighted>(w, gz, e.gt, ta, e.gw + at.w);
        }
        uncouple(a, b, plain ? gz : e.gt, gx, gy);
        if constexpr (S::weighted) {
          couple<false>(x, y, e.t);
          mix(e.c + at.w, e.t, e.z + z_at);
          unmix<false>(e.c + at.w, gz, e.gtc, e.t, e.gw);
          uncouple(x, y, e.gtc, gx, gy);
        }
      }
      if constexpr (!direct) {
        collect_u(gx, e.gx + x_at);
        collect_v(gy, e.gy + y_at);
      }
    }
  }
};

// A path of a shape with one channel v alone: channel by channel, so that lanes are channels u.
template <class S>
struct OneColumn {
  typedef typename S::Coupling Coupling;
  static constexpr int mul1 = S::mul1, mul2 = 1, mul3 = S::mul1;
  static constexpr PairKind pairs_kind = all_pairs;
  static constexpr MixingKind mixing = own_channels;
  static constexpr bool weighted = S::weighted;
};

// A path of sums over v, one v after another: its attributes, and a column of its weights, are copied.
template <class S>
void run_columns(const EdgeState& e, const PathPlace& at, int x_at, int y_at, int z_at) {
  constexpr int d2 = S::Coupling::d2, stride2 = padded(S::mul2);
  T y[d2 * lanes], b[d2 * lanes], gy[d2 * lanes];
  EdgeState one = e;
  one.y = y;
  one.b = b;
  one.gy = gy;
  one.w = e.ys;
  one.c = e.bs;
  one.gw = e.gys;
  for (int v = 0; v < S::mul2; ++v) {
    for (int j = 0; j < d2; ++j) {
      y[j * lanes] = e.y[y_at + j * stride2 + v];
      if (has_tangents) b[j * lanes] = e.b[y_at + j * stride2 + v];
      gy[j * lanes] = 0;
    }
    for (int u = 0; u < (S::weighted ? S::mul1 : 0); ++u) {
      e.ys[u] = e.w[at.w + u * S::mul2 + v];
      if (has_tangents) e.bs[u] = e.c[at.w + u * S::mul2 + v];
    }
    PathRun<OneColumn<S>>::run(one, PathPlace{}, x_at, 0, z_at);
    if (!has_gradient) continue;
    for (int j = 0; j < d2; ++j) e.gy[y_at + j * stride2 + v] += gy[j * lanes];
    for (int u = 0; u < (S::weighted ? S::mul1 : 0); ++u) e.gw[at.w + u * S::mul2 + v] = e.gys[u];
  }
}

// ---- edges of a graph, rows of a batch

template <class P>
struct Worker {
  typedef PaddedRows<typename P::X> X;
  typedef PaddedRows<typename P::Y> Y;
  typedef PaddedRows<typename P::Z> Z;
  static constexpr int components = P::d1 > P::d2 ? P::d1 : P::d2, most = components > P::d3 ? components : P::d3;
  static constexpr int64_t array = align(most * padded(P::pairs) + lanes);  // a vector may begin at the last pair
  static constexpr int64_t x_size = align(X::size), y_size = align(Y::size), z_size = align(Z::size);
  static constexpr int64_t elements = 3 * (x_size + y_size) + 2 * z_size + 10 * array;

  const eq_operands& o;
  const Topology g;
  EdgeState e;

  Worker(const eq_operands& operands, T* memory) : o(operands), g{operands}, e() {
    memset(memory, 0, elements * sizeof(T));
    const auto take = [&](int64_t size) {
      memory += size;
      return memory - size;
    };
    T **const x_rows[] = {&e.x, &e.a, &e.gx}, **const y_rows[] = {&e.y, &e.b, &e.gy}, **const z_rows[] = {&e.z, &e.gz};
    T** const arrays[] = {&e.xs, &e.ys, &e.t, &e.as, &e.bs, &e.ta, &e.gt, &e.gtc, &e.gxs, &e.gys};
    for (T** each : x_rows) *each = take(x_size);
    for (T** each : y_rows) *each = take(y_size);
    for (T** each : z_rows) *each = take(z_size);
    for (T** each : arrays) *each = take(array);
  }

  static const T* row(const void* rows, int64_t n, int64_t dim) { return static_cast<const T*>(rows) + n * dim; }

  void begin(int64_t receiver) {
    if (writes_z) memset(e.z, 0, Z::size * sizeof(T));
    if (has_gradient) Z::fill(row(o.gz, receiver, P::z_dim), e.gz, o.mul_ir);
  }
  void finish(int64_t receiver) const {
    if (!writes_z) return;
    Z::template empty<false>(e.z, static_cast<T*>(o.z) + receiver * P::z_dim, o.mul_ir);
  }
  // gx is where the gradient of x of this slot's sender is added up; it is zero before, or `fresh` and anything.
  void run(int64_t slot, T* gx, bool fresh) {
    const int64_t edge = g.edge(slot), sender = g.sender(slot);
    X::fill(row(o.x, sender, P::x_dim), e.x, o.mul_ir);
    Y::fill(row(o.y, edge, P::y_dim), e.y, true);
    e.w = row(o.w, edge, o.w_stride);
    if (has_tangents) {
      X::fill(row(o.a, sender, P::x_dim), e.a, o.mul_ir);
      Y::fill(row(o.b, edge, P::y_dim), e.b, true);
      e.c = row(o.c, edge, o.c_stride);
    }
    if (has_gradient) {
      memset(e.gx, 0, X::size * sizeof(T));
      memset(e.gy, 0, Y::size * sizeof(T));
      e.gw = static_cast<T*>(o.gw) + edge * P::w_dim;
    }
    P::each_shape([&](auto shape) {
      typedef decltype(shape) S;
      for (int n = 0; n < S::paths; ++n) {
        const PathPlace at = S::place(n);
        const int x_at = X::places.of[at.in1], y_at = Y::places.of[at.in2], z_at = Z::places.of[at.out];
        if constexpr (S::mixing == over_v && S::mul2 > 1) run_columns<S>(e, at, x_at, y_at, z_at);
        else PathRun<S>::run(e, at, x_at, y_at, z_at);
      }
    });
    if (!has_gradient) return;
    Y::template empty<false>(e.gy, static_cast<T*>(o.gy) + edge * P::y_dim, true);
    if (fresh) X::template empty<false>(e.gx, gx, o.mul_ir);
    else X::template empty<true>(e.gx, gx, o.mul_ir);
  }
};

// Gradients of x of a graph are added up in a buffer for each chunk of the receivers, and those in order.
template <class P>
int64_t pair_chunks(const eq_operands& o) {
  return has_gradient && o.row_ptr ? chunk_count<P>(o) : 0;
}

template <class P>
int64_t pair_space(const eq_operands& o) {
  return pair_chunks<P>(o) * o.num_senders * P::x_dim;
}

template <class P>
void launch_pairs(const eq_operands& o) {
  const Scratch memory(Worker<P>::elements, o.threads);
  const int64_t buffers = pair_chunks<P>(o), chunks = buffers > 0 ? buffers : o.num_receivers;
  T* const space = static_cast<T*>(o.workspace);
  const int64_t size = o.num_senders * P::x_dim, taken = taken_at_a_time(o.num_receivers, o.threads);
#pragma omp parallel num_threads(o.threads)
  {
    Worker<P> worker(o, memory.own());
    const Topology& g = worker.g;
#pragma omp for schedule(dynamic, 1)
    for (int64_t chunk = 0; chunk < buffers; ++chunk) {
      memset(space + chunk * size, 0, size * sizeof(T));
      const int64_t last = chunk_begin(g, chunk + 1, chunks);
      for (int64_t receiver = chunk_begin(g, chunk, chunks); receiver < last; ++receiver) {
        worker.begin(receiver);
        for (int64_t slot = g.begin(receiver); slot < g.end(receiver); ++slot)
          worker.run(slot, space + chunk * size + g.sender(slot) * P::x_dim, false);
        worker.finish(receiver);
      }
    }
    if (buffers == 0) {
#pragma omp for schedule(dynamic, taken)
      for (int64_t receiver = 0; receiver < o.num_receivers; ++receiver) {
        worker.begin(receiver);
        for (int64_t slot = g.begin(receiver); slot < g.end(receiver); ++slot)
          worker.run(slot, static_cast<T*>(o.gx) + slot * P::x_dim, true);
        worker.finish(receiver);
      }
    }
#pragma omp for schedule(static)
    for (int64_t sender = 0; sender < (buffers > 0 ? o.num_senders : 0); ++sender) {
      T* const to = static_cast<T*>(o.gx) + sender * P::x_dim;
      memcpy(to, space + sender * P::x_dim, P::x_dim * sizeof(T));
      for (int64_t chunk = 1; chunk < buffers; ++chunk)
        for (int i = 0; i < P::x_dim; ++i) to[i] += space[chunk * size + sender * P::x_dim + i];
    }
  }
}

}  // namespace

#define EQ_EXPORT_PAIRS(P)                                                                                             \
  extern "C" __attribute__((visibility("default"))) void eq_launch(const eq_operands* o) { launch_pairs<P>(*o); }      \
                                                                                                                       \
  extern "C" __attribute__((visibility("default"))) int64_t eq_workspace_bytes(const eq_operands* o) {                 \
    return pair_space<P>(*o) * int64_t(sizeof(T));                                                                     \
  }

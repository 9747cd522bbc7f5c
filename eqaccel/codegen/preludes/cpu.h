// CPU prelude: a lane value is a SIMD vector of channels, a block is a range of receivers of one thread.
//
// The generated body that follows defines `Problem` and its segments in terms of T, Lane, Sum, fma, dot, read_entries
// and EQ_CHANNELS; cpu_lane.h gives those their meaning, and this file runs them over a graph.
#pragma once
#include "abi.h"
#include "cpu_edge.h"
#include "cpu_lane.h"
#include "cpu_layout.h"
#include "direction.h"

namespace {

// The graph of a launch; for a batch, row n is receiver, sender and edge n at once. Edges may share rows of weights.
struct Topology {
  const eq_operands& o;
  const int32_t* w_row;  // (num_edges) row of the weights of an edge; null if that is its own
  EQ_FN int64_t begin(int64_t receiver) const { return o.row_ptr ? o.row_ptr[receiver] : receiver; }
  EQ_FN int64_t end(int64_t receiver) const { return o.row_ptr ? o.row_ptr[receiver + 1] : receiver + 1; }
  EQ_FN int64_t edge(int64_t slot) const { return o.row_ptr ? o.edge[slot] : slot; }
  EQ_FN int64_t sender(int64_t slot) const { return o.row_ptr ? o.sender[slot] : slot; }
  EQ_FN const W* weights(int64_t slot) const {
    const int64_t own = edge(slot);
    return static_cast<const W*>(o.w) + (w_row ? w_row[own] : own) * o.w_stride;
  }
  EQ_FN bool batch() const { return !o.row_ptr; }
};

// Entries of the edges in slots `slot` to slot + lanes, one SIMD element an edge; slots from `end` on repeat the last.
template <class P>
void build_entries(const Topology& g, const void* rows, int64_t slot, int64_t end, Lane* entries) {
  const T* y = static_cast<const T*>(rows);
  Lane columns[P::y_dim];
  for (int e = 0; e < lanes; ++e) {
    const T* row = y + g.edge(slot + e < end ? slot + e : end - 1) * P::y_dim;
    for (int j = 0; j < P::y_dim; ++j) columns[j][e] = row[j];
  }
  P::build_entries(columns, entries);
}

// (mul, 2l+1) to (2l+1, mul) inside each block of a row, or back.
struct Relayout {
  const T* from;
  T* to;
  bool to_mul_ir;
  EQ_FN void operator()(int offset, int mul, int dim) const {
    if (dim == 1) memcpy(to + offset, from + offset, mul * sizeof(T));
    else if (to_mul_ir) to_channels<false>(from + offset, mul, mul, dim, to + offset);
    else to_components(from + offset, mul, dim, to + offset, mul);
  }
};

template <class P>
EQ_FN void write_z(const eq_operands& o, const T* row, int64_t receiver) {
  T* to = static_cast<T*>(o.z) + receiver * P::z_dim;
  if (o.mul_ir) P::each_z_block(Relayout{row, to, true});
  else memcpy(to, row, P::z_dim * sizeof(T));
}

// ---- forward

template <int mul>
struct ForwardX {
  const T* row;
  int c;
  EQ_FN Lane at(int offset) const { return load<mul>(row + offset, c); }
};
template <int mul>
struct ForwardW {
  const W* row;
  int c;
  EQ_FN Lane at(int offset, int) const { return load<mul>(row + offset, c); }
};

// Edges of a forward block: time falls with their number, by a tenth from 16 to 64 (measured on Zen 4, mace-large).
constexpr int least_edges = 16, most_edges = 64;

// As many edges of a forward block as leave its weights and the next block's in three quarters of the second-level
// cache. Where nobody tells its size, that is 1 MiB. Results do not depend on it.
EQ_FN int forward_edges(int64_t w_bytes) {
#ifdef _SC_LEVEL2_CACHE_SIZE
  static const int64_t said = sysconf(_SC_LEVEL2_CACHE_SIZE);
#else
  constexpr int64_t said = 0;
#endif
  const int64_t weights = (said > 0 ? said : 1 << 20) * 3 / 8;
  int edges = most_edges;
  while (edges > least_edges && edges * w_bytes > weights) edges /= 2;
  return edges;
}

// Edges of a receiver that run together while its outputs stay in registers.
template <class P>
struct ForwardBlock {
  const T* x[most_edges];
  const W* w[most_edges];
  const W* ahead[most_edges];  // rows of weights that are read a block of edges later
  Lane* entries;
  int size, count;
  T* z;
  bool fresh;  // nothing was added to z before
  T* out;      // where finished outputs are streamed to; null if they stay in z

  EQ_FN const T* entries_of(int e) const {
    return reinterpret_cast<const T*>(entries + e / lanes * P::entries) + e % lanes;
  }

  template <class Segment>
  EQ_FN void run(Segment, int c) const {
    if (c >= Segment::mul) return;
    constexpr int line = 64 * sizeof(W) / sizeof(T);  // of a path
    Lane acc[Segment::outputs];  // in registers only if every loop over it is unrolled
#pragma GCC unroll 64
    for (int k = 0; k < Segment::outputs; ++k)
      acc[k] = fresh ? Lane{} : load<Segment::mul>(z + Segment::z_offset(k), c);
    for (int e = 0; e < count; ++e) {
      // In address order, evenly over the arithmetic: in bursts they would ask for more than the memory gives.
      const char* fetched = (const char*)ahead[e] + c / lanes * P::paths * line;
#pragma GCC unroll 32
      for (int n = Segment::first_fetch; n < Segment::end_fetch; ++n) __builtin_prefetch(fetched + n * line, 0, 2);
      Segment::edge(ForwardX<Segment::mul>{x[e], c}, ForwardW<Segment::mul>{w[e], c}, entries_of(e), acc);
    }
#pragma GCC unroll 64
    for (int k = 0; k < Segment::outputs; ++k) {
      if (out) stream_store(out + Segment::z_offset(k) + c, acc[k]);
      else store<Segment::mul>(z + Segment::z_offset(k), c, acc[k]);
    }
  }
};

template <class P>
void forward_receiver(const Topology& g, const T* x, int64_t receiver, T* z, Lane* entries, int size, bool stream) {
  const int64_t begin = g.begin(receiver), end = g.end(receiver);
  const bool direct = stream && begin < end;
  if (!direct) memset(z, 0, P::z_dim * sizeof(T));
  ForwardBlock<P> block;
  block.entries = entries;
  block.size = size;
  block.z = z;
  for (int64_t slot = begin; slot < end; slot += block.size) {
    block.count = end - slot < block.size ? int(end - slot) : block.size;
    block.fresh = direct && slot == begin;
    block.out = direct && end - slot <= block.size ? static_cast<T*>(g.o.z) + receiver * P::z_dim : nullptr;
    for (int e = 0; e < block.count; ++e) {
      const int64_t last = g.o.num_edges - 1;
      const int64_t later = slot + e + block.size < last ? slot + e + block.size : last;
      block.x[e] = x + g.sender(slot + e) * P::x_dim;
      block.w[e] = g.weights(slot + e);
      block.ahead[e] = g.weights(later);
      open_pages(block.ahead[e], P::w_dim);
      if (e % lanes == 0) build_entries<P>(g, g.o.y, slot + e, end, entries + e / lanes * P::entries);
    }
    for (int c = 0; c < P::largest_mul; c += lanes) P::each_segment([&](auto segment) { block.run(segment, c); });
  }
  if (!direct) write_z<P>(g.o, z, receiver);
}

// ---- gradients; what an edge reads and writes is in cpu_edge.h

// The sum of n elements, half of them added to the other half at each level.
template <int n>
EQ_FN T add_up(const T* v) {
  if constexpr (n == 1) {
    return v[0];
  } else {
    typedef T Half __attribute__((vector_size(n / 2 * sizeof(T)), aligned(sizeof(T)), may_alias));
    const Half half = *(const Half*)v + *(const Half*)(v + n / 2);
    return add_up<n / 2>((const T*)&half);
  }
}

// Receivers in contiguous chunks of nearly equal edges. A chunk adds gx into a buffer of its own and the buffers are
// added in order afterwards; their number depends on the graph alone, so results do not depend on the thread count.
constexpr int64_t edges_of_chunk = 1024;  // work of 0.25 ms (mp0-first) to 2 ms (mace-large) on Zen 4
constexpr int64_t most_chunks = 48;       // as many threads have work; a gradient of x is a sum over all chunks

template <class P>
int64_t chunk_count(const eq_operands& o) {
  if (o.num_edges == 0) return 1;
  const int64_t by_work = o.num_edges / edges_of_chunk;
  // The buffers take no more memory than weights and attributes do; those of a batch are parts of one.
  const int64_t buffer = gradients * P::x_dim * o.num_senders;
  const int64_t by_memory = o.row_ptr && buffer > 0 ? o.num_edges * (P::w_dim + P::y_dim) / buffer : most_chunks;
  const int64_t count = by_work < by_memory ? by_work : by_memory;
  return count < 1 ? 1 : count > most_chunks ? most_chunks : count;
}

template <class P>
struct Workspace {
  T *x[tangents], *gz[gradients], *gx;
  int64_t elements;
  Workspace(const eq_operands& o, T* base) {
    int64_t used = 0;
    auto take = [&](int64_t count) {
      T* at = base + used;
      used += align(count);
      return at;
    };
    const int64_t relayout = o.mul_ir ? 1 : 0;
    for (T*& rows : x) rows = take(relayout * o.num_senders * P::x_dim);
    for (T*& rows : gz) rows = take(has_gradient ? relayout * o.num_receivers * P::z_dim : 0);
    gx = take(has_gradient ? (o.row_ptr ? chunk_count<P>(o) : 1) * o.num_senders * gradients * P::x_dim : 0);
    elements = used;
  }
};

template <class P>
const T* to_channels_fastest(const eq_operands& o, const void* rows, int64_t count, int dim, bool is_x, T* space) {
  const T* from = static_cast<const T*>(rows);
  if (!o.mul_ir) return from;
#pragma omp for schedule(static)
  for (int64_t n = 0; n < count; ++n) {
    const Relayout row{from + n * dim, space + n * dim, false};
    if (is_x) P::each_x_block(row);
    else P::each_z_block(row);
  }
  return space;
}

template <class P>
void launch_forward(const Topology& g) {
  const eq_operands& o = g.o;
  const Workspace<P> space(o, static_cast<T*>(o.workspace));
  // Outputs are streamed where weights push them out of the caches anyway, if a vector is a whole cache line.
  const bool whole = P::output_channels > 0 && P::output_channels % lanes == 0 && sizeof(Lane) == 64;
  const bool stream = whole && uintptr_t(o.z) % 64 == 0 && !o.mul_ir && o.num_edges * o.w_stride * sizeof(W) > much;
  const int size = forward_edges(P::w_dim * sizeof(W));
  const Scratch entries_of(size * P::entries, o.threads), z_of(P::z_dim, o.threads);
  const int64_t taken = taken_at_a_time(o.num_receivers, o.threads);
#pragma omp parallel num_threads(o.threads)
  {
    Lane* entries = reinterpret_cast<Lane*>(entries_of.own());
    T* z = z_of.own();
    const T* x = to_channels_fastest<P>(o, o.x, o.num_senders, P::x_dim, true, space.x[0]);
#pragma omp for schedule(dynamic, taken)
    for (int64_t receiver = 0; receiver < o.num_receivers; ++receiver) {
      forward_receiver<P>(g, x, receiver, z, entries, size, stream);
    }
    finish_streams();
  }
}

// Fetches what edges `first` to `end` out of `count` have to, so that all together fetch a row.
EQ_FN void fetch_share(const T* row, int64_t elements, int64_t first, int64_t end, int64_t count) {
  const int64_t lines = elements * sizeof(T) / 64, last = end * lines / count;
  for (int64_t n = first * lines / count; n < last; ++n) __builtin_prefetch((const char*)row + n * 64, 0, 2);
}

// First receiver of a chunk: where the edges before it reach the chunk's share.
int64_t chunk_begin(const Topology& g, int64_t chunk, int64_t chunks) {
  if (chunk == chunks) return g.o.num_receivers;
  const int64_t edges = g.o.num_edges * chunk / chunks;
  int64_t low = 0, high = g.o.num_receivers;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (g.begin(middle) < edges) low = middle + 1;
    else high = middle;
  }
  return low;
}

// Edges of a receiver that take turns in each segment, so that the gradients it reads stay in the first-level cache.
constexpr int most_turns = lanes < 8 ? lanes : 8;

template <class P>
void run_edges(const EdgeRows* rows, int count, const T* entries, Sum* sums) {
  constexpr int step = P::entries * lanes, sums_of_edge = gradients * P::y_dim;
  for (int j = 0; j < count * sums_of_edge; ++j) sums[j] = Sum{};
  P::each_segment([&](auto segment) {
    for (int e = 0; e < count; ++e) {
      const T* const own = entries + e;
      Sum* const gy = sums + e * sums_of_edge;
      if constexpr (has_second) decltype(segment)::edge(rows[e], own, own + step, own + 2 * step, gy, gy + P::y_dim);
      else decltype(segment)::edge(rows[e], own, own + step, gy);
    }
  });
  for (int e = 0; e < count; ++e)
    for (int n = 0; n < gradients; ++n)
      for (int j = 0; j < P::y_dim; ++j)
        rows[e].gy[n][j] = add_up<lanes>((const T*)&sums[e * sums_of_edge + n * P::y_dim + j]);
}

// Tangents of weights, from 1 on: rows, and how many elements they are apart.
struct TangentWeights {
  const T* rows[tangents];
  int64_t strides[tangents];
  EQ_FN explicit TangentWeights(const eq_operands& o) {
    if constexpr (has_tangents) set(1, o.c, o.c_stride);
    if constexpr (has_second) set(2, o.r, o.r_stride);
  }
  EQ_FN void set(int n, const void* values, int64_t stride) {
    rows[n] = static_cast<const T*>(values);
    strides[n] = stride;
  }
};

template <class P>
void launch_gradient(const Topology& g) {
  const eq_operands& o = g.o;
  const Workspace<P> space(o, static_cast<T*>(o.workspace));
  const int64_t chunks = chunk_count<P>(o);
  T* const gws[] = {static_cast<T*>(o.gw), static_cast<T*>(o.gc)};
  T* const gys[] = {static_cast<T*>(o.gy), static_cast<T*>(o.gb)};
  void* const gxs[] = {o.gx, o.ga};
  const TangentWeights c(o);
  const bool aligned = (uintptr_t(o.gw) | uintptr_t(o.gc)) % EQ_SIMD_BYTES == 0 && P::w_dim % lanes == 0;
  const bool stream = aligned && o.num_edges * P::w_dim * sizeof(T) > much;
  struct Window {
    int64_t begin, end;
  };
  const Scratch windows_of((sizeof(Window) * chunks + sizeof(T) - 1) / sizeof(T), 1);
  Window* windows = reinterpret_cast<Window*>(windows_of.of(0));
  constexpr int64_t gx_dim = gradients * P::x_dim;  // of a sender in a buffer
  const Scratch entries_of((has_second ? 3 : 2) * P::entries * lanes, o.threads);
  const Scratch sums_of(most_turns * gradients * P::y_dim * lanes, o.threads);
  const Scratch ggz_of(P::z_dim, o.threads), gx_row_of(gx_dim, o.threads);
#pragma omp parallel num_threads(o.threads)
  {
    Lane* entries = reinterpret_cast<Lane*>(entries_of.own());
    T* ggz = ggz_of.own();
    T* gx_row = gx_row_of.own();
    Sum* sums = reinterpret_cast<Sum*>(sums_of.own());
    const void *const given_x[] = {o.x, o.a, o.p}, *const given_gz[] = {o.gz, o.g};
    const T *x[tangents], *gz[gradients];
    for (int t = 0; t < tangents; ++t)
      x[t] = to_channels_fastest<P>(o, given_x[t], o.num_senders, P::x_dim, true, space.x[t]);
    for (int n = 0; n < gradients; ++n)
      gz[n] = to_channels_fastest<P>(o, given_gz[n], o.num_receivers, P::z_dim, false, space.gz[n]);
#pragma omp for schedule(dynamic, 1)
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const int64_t first = chunk_begin(g, chunk, chunks), last = chunk_begin(g, chunk + 1, chunks);
      const int64_t begin = first < last ? g.begin(first) : 0, end = first < last ? g.end(last - 1) : 0;
      Window window{o.num_senders, 0};
      for (int64_t slot = begin; slot < end; ++slot) {
        const int64_t sender = g.sender(slot);
        if (sender < window.begin) window.begin = sender;
        if (sender >= window.end) window.end = sender + 1;
      }
      windows[chunk] = window;
      T* gx = space.gx + (g.batch() ? 0 : chunk * o.num_senders * gx_dim);
      if (window.begin < window.end)
        memset(gx + window.begin * gx_dim, 0, (window.end - window.begin) * gx_dim * sizeof(T));
      for (int64_t receiver = first; receiver < last; ++receiver) {
        if (has_tangents) memset(ggz, 0, P::z_dim * sizeof(T));
        const int64_t own = g.begin(receiver), own_end = g.end(receiver);
        const int64_t next = receiver + 1 < last ? receiver + 1 : receiver;
        int count;
        for (int64_t slot = own; slot < own_end; slot += count) {
          const int lane = (slot - begin) % lanes, left = lanes - lane < most_turns ? lanes - lane : most_turns;
          count = own_end - slot < left ? own_end - slot : left;
          if (lane == 0) {
            build_entries<P>(g, o.y, slot, end, entries);
            if (has_tangents) build_entries<P>(g, o.b, slot, end, entries + P::entries);
            if (has_second) build_entries<P>(g, o.q, slot, end, entries + 2 * P::entries);
          }
          EdgeRows rows[most_turns];
          for (int e = 0; e < count; ++e) {
            const int64_t edge = g.edge(slot + e), sender = g.sender(slot + e);
            const int64_t later = slot + e + most_turns < end ? slot + e + most_turns : end - 1;
            EdgeRows& row = rows[e];
            row.w = g.weights(slot + e);
            row.w_ahead = g.weights(later);
            row.ggz = ggz;
            row.stream = stream;
            for (int t = 0; t < tangents; ++t) row.x[t] = x[t] + sender * P::x_dim;
            for (int t = 1; t < tangents; ++t) {
              row.c[t] = c.rows[t] + edge * c.strides[t];
              row.c_ahead[t] = c.rows[t] + g.edge(later) * c.strides[t];
            }
            for (int n = 0; n < gradients; ++n) {
              row.gz[n] = gz[n] + receiver * P::z_dim;
              row.gx[n] = gx + sender * gx_dim + n * P::x_dim;
              row.gy[n] = gys[n] + edge * P::y_dim;
              row.gw[n] = gws[n] + edge * P::w_dim;
            }
          }
          for (const T* rows_of : gz)
            fetch_share(rows_of + next * P::z_dim, P::z_dim, slot - own, slot + count - own, own_end - own);
          run_edges<P>(rows, count, reinterpret_cast<const T*>(entries) + lane, sums);
        }
        if (has_tangents) write_z<P>(o, ggz, receiver);
      }
    }
    finish_streams();
#pragma omp for schedule(static)
    for (int64_t sender = 0; sender < o.num_senders; ++sender) {
      T* row = gx_row;
      memset(row, 0, gx_dim * sizeof(T));
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        if (sender < windows[chunk].begin || sender >= windows[chunk].end) continue;
        const T* part = space.gx + ((g.batch() ? 0 : chunk * o.num_senders) + sender) * gx_dim;
        for (int i = 0; i < gx_dim; ++i) row[i] += part[i];
      }
      for (int n = 0; n < gradients; ++n) {
        const T* from = row + n * P::x_dim;
        T* to = static_cast<T*>(gxs[n]) + sender * P::x_dim;
        if (o.mul_ir) P::each_x_block(Relayout{from, to, true});
        else memcpy(to, from, P::x_dim * sizeof(T));
      }
    }
  }
}

template <class P>
void launch(const Topology& g) {
  if constexpr (has_gradient) launch_gradient<P>(g);
  else launch_forward<P>(g);
}

}  // namespace

// `eq_launch_shared`: `w_row` (num_edges) says which row of w an edge has; gradients of weights are those of each edge.
#define EQ_EXPORT(P)                                                                                                   \
  extern "C" __attribute__((visibility("default"))) void eq_launch_shared(const eq_operands* o,                        \
                                                                          const int32_t* w_row) {                      \
    launch<P>(Topology{*o, w_row});                                                                                    \
  }                                                                                                                    \
  extern "C" __attribute__((visibility("default"))) void eq_launch(const eq_operands* o) {                             \
    eq_launch_shared(o, nullptr);                                                                                      \
  }                                                                                                                    \
                                                                                                                       \
  extern "C" __attribute__((visibility("default"))) int64_t eq_workspace_bytes(const eq_operands* o) {                 \
    return Workspace<P>(*o, nullptr).elements * int64_t(sizeof(T));                                                    \
  }

// GPU prelude: shared memory of a warp that takes some edges at a time, and the copies that bring operands there.
//
// Where a machine has an engine for copies, rows of x, y and gz come whole when a warp begins with its edges, and so do
// weights if they are few. Many weights come in chunks of some pairs, in the order in which paths are mixed: the next are
// on their way while pairs are coupled and mixed. Each edge has a lane that asks for its copies.
#pragma once
#include "gpu.h"

namespace {

constexpr int warp = 32;

enum WeightCopies { no_copies, copies_of_rows, copies_of_chunks };
// The rows of an edge that may be copied.
enum CopiedRow { x_copy, y_copy, w_copy, a_copy, b_copy, gz_copy, row_kinds };

// The weights of a path that come in chunks, as large as each other but for the last one, in elements.
struct WeightRun {
  int offset, elements, chunk;
};
// How many chunks were mixed, and which one is copied next: its run, and the elements of the run before it.
struct NextChunk {
  int mixed, run, done;
};
// Weights of the edges that a warp has taken.
struct EdgeWeights {
  const T *w, *c;
  int64_t w_stride, c_stride;
  int edges;
  // Whether chunks leave the second-level cache first. They should where much else is read again, as in a forward kernel
  // on a graph; where they do, what is stored leaves it late and in no order, which takes memory longer.
  bool leave_first;
};

// What an edge reads and writes: rows in device memory, and where its sums are.
struct PairRows {
  const T *x, *y, *w, *gz, *a, *b, *c;
  T *z, *gx, *gy, *gw;
  bool starts_z;  // whether no edge before it has stored z
  bool atomic;  // gradients of x are in device memory, and others add to them
};

// Shared memory, in elements: arrays (edge, pair, component) of a tile, sums of edges, the rows that they read, chunks of
// weights, and then barriers and the numbers of edges.
template <class P>
struct PairLayout {
  typedef P Problem;
  static constexpr int edges = P::edges, lanes = warp / edges, span = P::span, array = edges * span;
  static constexpr int t = 0, ta = array, gt = has_tangents ? 2 * array : array, gtc = gt + array;
  static constexpr int sums = (has_tangents ? 4 : has_gradient ? 2 : 1) * array;
  static constexpr bool adds_z = writes_z && P::rows_shared && !P::stores_z;
  // Of the row of an edge.
  static constexpr int gx_sum = adds_z ? P::z_dim : 0, gy_sum = gx_sum + (has_gradient ? P::x_dim : 0);
  static constexpr int end = gy_sum + (has_gradient ? P::y_dim : 0), row = P::rows_shared ? (end + 3) / 8 * 8 + 4 : 0;

  static constexpr bool has_matrices = P::runs > 0;  // of weights
  static constexpr bool copies_rows = P::copies != no_copies, copies_w = P::copies == copies_of_rows;
  static constexpr bool copies_chunks = P::copies == copies_of_chunks;
  static_assert(!copies_w || !has_gradient, "weights are copied whole forward alone");
  // Rows have room for all that shares 16 bytes with them: those of x, y and w, then of tangents, then of gz.
  static EQ_FN constexpr int room(int dim) {
    constexpr int quad = 16 / int(sizeof(T));
    return round_up(dim, quad) + quad;
  }
  static constexpr int y_row = room(P::x_dim), w_row = y_row + room(P::y_dim);
  static constexpr int operands = w_row + (copies_w ? room(P::w_dim) : 0), gz_row = tangents * operands;
  static constexpr int copied = copies_rows ? gz_row + (has_gradient ? room(P::z_dim) : 0) : 0;
  static constexpr int rows = sums + edges * row, chunks = rows + edges * copied;
  static constexpr int stages = copies_chunks ? P::stages : 0, stage = tangents * edges * P::chunk;
  static constexpr int barriers = chunks + stages * stage, barriers_bytes = copies_rows ? 8 * (1 + stages) : 0;
  static constexpr int per_edge = 3 + (copies_rows ? int(row_kinds) : 0);
  static constexpr int bytes = barriers * int(sizeof(T)) + barriers_bytes + per_edge * edges * int(sizeof(int));

  // Of edges, then of their senders, then of their receivers, then of the first elements of their copied rows.
  static EQ_FN int* numbers(T* shared) {
    return reinterpret_cast<int*>(reinterpret_cast<char*>(shared + barriers) + barriers_bytes);
  }
  static EQ_FN int& first_element(T* shared, int e, CopiedRow row) { return numbers(shared)[(3 + row) * edges + e]; }
  // Where the room for a copied row of edge e begins, and a chunk with its number.
  static EQ_FN int row_room(int e, int row) { return rows + e * copied + row; }
  static EQ_FN T* chunk_place(T* shared, int e, int number, int tangent) {
    return shared + chunks + number % (stages > 0 ? stages : 1) * stage + (tangent * edges + e) * P::chunk;
  }
};

// Elements between `from` and the last address before it that is a multiple of 16 bytes, from where it is copied.
EQ_FN int misalignment(const T* from) {
  return static_cast<int>(reinterpret_cast<unsigned long long>(from) % 16 / sizeof(T));
}
template <class L>
EQ_FN const T* copied_row(T* shared, int e, CopiedRow row) {
  return shared + L::first_element(shared, e, row);
}

// Runs on each row of an edge that is copied: the row, which one it is, its elements, where the room for its copy is among
// those of the edge, and whether no other edge reads it.
template <class L, class F>
EQ_FN void each_copied_row(PairRows& rows, const F& run) {
  typedef typename L::Problem P;
  run(rows.x, x_copy, P::x_dim, 0, false);
  run(rows.y, y_copy, P::y_dim, L::y_row, true);
  if constexpr (L::copies_w) run(rows.w, w_copy, P::w_dim, L::w_row, true);
  if constexpr (has_tangents) {
    run(rows.a, a_copy, P::x_dim, L::operands, false);
    run(rows.b, b_copy, P::y_dim, L::operands + L::y_row, true);
  }
  if constexpr (has_gradient) run(rows.gz, gz_copy, P::z_dim, L::gz_row, false);
}

#if EQ_BULK_COPY
// Elements of device memory with all that shares 16 bytes with the first and the last one.
struct Granules {
  const T* first;
  unsigned bytes;
  EQ_FN Granules(const T* from, int count) {
    const auto begin = reinterpret_cast<unsigned long long>(from), end = begin + count * sizeof(T);
    first = reinterpret_cast<const T*>(begin / 16 * 16);
    bytes = static_cast<unsigned>((end + 15) / 16 * 16 - begin / 16 * 16);
  }
  EQ_FN void copy(T* to, unsigned barrier, bool leave_first) const {
    bulk_copy(to, first, bytes, barrier, leave_first ? read_once : read_often);
  }
};

// The barrier of a stage of chunks, and after them that of rows: copies are done once each edge and all bytes have arrived.
template <class L>
EQ_FN unsigned barrier(T* shared, int n) {
  return shared_address(shared + L::barriers) + 8 * n;
}
template <class L>
EQ_FN void init_copies(T* shared, int lane) {
  if (lane <= L::stages) init_barrier(barrier<L>(shared, lane), L::edges);
  publish_barriers();
}

// Each lane up to L::edges asks for the rows of its edge, if it has one, and notes where they will be.
template <class L>
EQ_FN void copy_rows(T* shared, int e, bool exists, PairRows rows) {
  const unsigned ready = barrier<L>(shared, L::stages);
  if (!exists) {
    arrive(ready);
    return;
  }
  unsigned bytes = 0;
  each_copied_row<L>(rows, [&](const T* from, CopiedRow, int dim, int, bool) { bytes += Granules(from, dim).bytes; });
  expect_bytes(ready, bytes);
  each_copied_row<L>(rows, [&](const T* from, CopiedRow row, int dim, int room, bool once) {
    Granules(from, dim).copy(shared + L::row_room(e, room), ready, once);
    L::first_element(shared, e, row) = L::row_room(e, room) + misalignment(from);
  });
}

// Asks for the next chunk, which takes the place of a mixed one and has this number.
template <class L>
EQ_FN void copy_chunk(T* shared, int lane, const EdgeWeights& weights, int number, NextChunk& next) {
  typedef typename L::Problem P;
  if (next.run == P::runs) return;
  const WeightRun run = P::weight_run(next.run);
  const int offset = run.offset + next.done, count = min(run.chunk, run.elements - next.done);
  next.done += count;
  if (next.done == run.elements) {
    ++next.run;
    next.done = 0;
  }
  if (lane >= L::edges) return;
  const unsigned ready = barrier<L>(shared, number % L::stages);
  if (lane >= weights.edges) {
    arrive(ready);
    return;
  }
  const int64_t edge = L::numbers(shared)[lane];
  const T* const w = weights.w + edge * weights.w_stride + offset;
  const T* const c = weights.c + edge * weights.c_stride + offset;
  const Granules of_w(w, count), of_c(has_tangents ? c : w, count);
  expect_bytes(ready, of_w.bytes + (has_tangents ? of_c.bytes : 0));
  of_w.copy(L::chunk_place(shared, lane, number, 0), ready, weights.leave_first);
  if constexpr (has_tangents) of_c.copy(L::chunk_place(shared, lane, number, 1), ready, weights.leave_first);
}
// The first ones for edges that a warp begins with.
template <class L>
EQ_FN void copy_first_chunks(T* shared, int lane, const EdgeWeights& weights, NextChunk& next) {
  next.run = next.done = 0;
#pragma unroll
  for (int n = 0; n < L::stages; ++n) copy_chunk<L>(shared, lane, weights, next.mixed + n, next);
}
template <class L>
EQ_FN void wait_for_chunk(T* shared, int number) {
  wait_barrier(barrier<L>(shared, number % L::stages), number / L::stages & 1);
}
#endif

}  // namespace

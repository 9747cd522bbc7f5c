// GPU prelude: how the rows and edge matrices of a block's edges reach shared memory.
#pragma once
#include "abi.h"
#include "direction.h"
#include "gpu_lane.h"
#include "machine.h"
#include "weights.h"

namespace {

EQ_FN constexpr int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// Shared memory of a block, in elements; `KernelPlan.shared_bytes` counts the same, as every kernel asserts.
template <class P>
struct Layout {
  static constexpr int edges = P::edges_per_stage, stages = P::stages, threads = 32 * (P::warps > 0 ? P::warps : 1);
  static constexpr int x_row = P::x_staged, w_row = P::w_staged * int(sizeof(W)) / int(sizeof(T));
  static constexpr int edge = (x_row + w_row) * tangents;  // x, w, then a, c, then p, r
  static constexpr int matrices = stages * edges * edge;
  static constexpr int attributes = matrices + 2 * edges * P::entries * tangents;
  static constexpr int gy = attributes + round_up((stages + 1) * edges * P::y_dim * tangents, 4);
  static constexpr int gy_share = edges * P::warp_groups * P::y_dim, gy_stage = gradients * gy_share;
  static constexpr int sums = gy + (has_gradient ? round_up(2 * gy_stage, 4) : 0);
  static constexpr int turned = sums + P::sums, barriers = turned + P::turned;
  // After the barriers, in bytes: ids of edges and senders, then the table of the terms of edge matrices.
  static constexpr int id_stages = stages + 3, ids_bytes = 8 * round_up(edges * id_stages, 2);
  // Forward, each thread holds the term of an entry of one term where there are no more of these than threads.
  static constexpr bool holds_single = !has_gradient && P::single <= threads;
  static constexpr int listed = holds_single ? P::single : 0;  // first of the terms in the table
  static constexpr int terms_bytes = sizeof(Term) * (P::single + P::terms * P::several - listed);
  static constexpr int bytes = barriers * sizeof(T) + 8 * round_up(stages, 2) + ids_bytes + terms_bytes;
};

EQ_FN void copy_element(Bfloat16* to, const Bfloat16* from) { *to = *from; }

// The edges of a block, brought to shared memory stage by stage.
template <class P>
struct Pipeline {
  typedef Layout<P> L;
  const eq_operands& o;
  const eq_work_split& split;
  T* shared;
  int thread, lane, warp;
  int first, last, steps;  // slots of the block
  int2* ids;                   // (row of weights, sender) of every slot of some stages
  Term* terms;                 // of the entries of edge matrices
  Term single;                 // the one that this thread holds
  int2 next;                   // ids on their way to shared memory
#if EQ_BULK_COPY
  static constexpr bool bulk = P::granule * sizeof(T) % 16 == 0;
  unsigned barrier;
#else
  static constexpr bool bulk = false;
#endif

  EQ_FN Pipeline(const eq_operands& o_, const eq_work_split& split_, T* shared_, int first_, int last_)
      : o(o_), split(split_), shared(shared_), thread(threadIdx.x), lane(threadIdx.x % 32), warp(threadIdx.x / 32),
        first(first_), last(last_), steps((last_ - first_ + L::edges - 1) / L::edges) {
    unsigned char* const tail = reinterpret_cast<unsigned char*>(shared + L::barriers) + 8 * round_up(L::stages, 2);
    ids = reinterpret_cast<int2*>(tail);
    terms = reinterpret_cast<Term*>(tail + L::ids_bytes);
    if (L::holds_single && thread < P::single) single = P::term(thread);
    for (int t = L::listed + thread; t < P::single + P::terms * P::several; t += L::threads)
      terms[t - L::listed] = P::term(t);
    for (int t = thread; t < (L::stages + 1) * L::edges; t += L::threads) ids[t] = read_id(first + t);
    look_up(L::stages + 1);
#if EQ_BULK_COPY
    warp = __shfl_sync(0xffffffffu, warp, 0);
    barrier = shared_address(shared + L::barriers);
    if (thread == 0) {
      for (int s = 0; s < L::stages; ++s) init_barrier(barrier + 8 * s);
      publish_barriers();
    }
#endif
    __syncthreads();
    issue_attributes(0);
    for (int step = 0; step < L::stages - 1; ++step) {
      issue_rows(step);
      issue_attributes(step + 1);
      commit_copies();
    }
    wait_copies<L::stages - 2>();
    __syncthreads();
    build_matrices(0);
  }

  // Row of weights (x) and sender (y) of edge e of a stage.
  EQ_FN int2 id(int step, int e) const { return ids[step % L::id_stages * L::edges + e]; }
  // Derivatives of gradients are those of weights that no edges share.
  EQ_FN bool shares_weights() const { return !has_tangents && split.w_row; }
  // Where the other operands of edge e of a stage are.
  EQ_FN int edge(int step, int e) const { return shares_weights() ? slot(step, e) : id(step, e).x; }
  EQ_FN T* rows(int step, int e) const { return shared + ((step % L::stages) * L::edges + e) * L::edge; }
  EQ_FN int slot(int step, int e) const { return first + step * L::edges + e; }
  EQ_FN int count(int step) const { return min(L::edges, last - slot(step, 0)); }

  EQ_FN int2 read_id(int slot) const {
    if (slot >= last) return make_int2(0, 0);
    if (!o.row_ptr) return make_int2(slot, slot);
    return make_int2((shares_weights() ? split.w_row : o.edge)[slot], o.sender[slot]);
  }
  // The warp that looks up ids and attributes. Forward and backward, the first one has enough to do with copies of rows.
  static constexpr int helper = !has_tangents && P::warps > 1 ? 1 : 0;
  // Ids are read from device memory one step before they are published to the block.
  EQ_FN void look_up(int step) {
    if (warp == helper && lane < L::edges) next = read_id(slot(step, lane));
  }
  EQ_FN void publish_ids(int step) {
    if (warp == helper && lane < L::edges) ids[step % L::id_stages * L::edges + lane] = next;
  }

  template <class Element>
  EQ_FN void copy_row(Element* to, const Element* from, int elements) const {
    const bool wide = elements * sizeof(Element) % 16 == 0 && reinterpret_cast<unsigned long long>(from) % 16 == 0;
    constexpr int width = 16 / sizeof(Element);
    if (wide) {
      for (int n = thread * width; n < elements; n += L::threads * width)
        copy_16_bytes(reinterpret_cast<T*>(to + n), reinterpret_cast<const T*>(from + n));
    } else {
      for (int n = thread; n < elements; n += L::threads) copy_element(to + n, from + n);
    }
  }

  EQ_FN void issue_rows(int step) {
    if (step >= steps) return;
    if constexpr (bulk) issue_bulk(step);
    else issue_elements(step);
  }
  EQ_FN void issue_bulk(int step) const {
#if EQ_BULK_COPY
    if (warp != 0) return;
    const unsigned ready = barrier + 8 * (step % L::stages);
    if (lane == 0) expect_bytes(ready, count(step) * unsigned(P::copied * sizeof(T) * tangents));
    __syncwarp();
    if (lane >= count(step)) return;
    T* const edge = rows(step, lane);
    const int2 of = id(step, lane);
    const T* const from[] = {x_row(o.x, of), w_row(o.w, o.w_stride, of), x_row(o.a, of), w_row(o.c, o.c_stride, of),
                             x_row(o.p, of), w_row(o.r, o.r_stride, of)};
#pragma unroll
    for (int n = 0; n < P::spans; ++n) {
      const CopySpan span = P::span(n);
      const bool is_w = n >= P::x_spans;
      T* const to = edge + (is_w ? L::x_row + of_weights(span.staged) : span.staged);
      const int offset = is_w ? of_weights(span.offset) : span.offset;
      const unsigned bytes = span.length * (is_w ? sizeof(W) : sizeof(T));
      // Weights leave the second-level cache first where other rows are read again and little is stored.
      const bool leaves_first = is_w && !has_gradient && o.row_ptr;
#pragma unroll
      for (int t = 0; t < tangents; ++t)
        bulk_copy(to + t * (L::edge / tangents), from[2 * t + is_w] + offset, bytes, ready,
                  leaves_first ? read_once : read_often);
    }
#endif
  }
  EQ_FN void issue_elements(int step) const {
    for (int e = 0; e < count(step); ++e) {
      const int2 of = id(step, e);
      const T* const from[] = {x_row(o.x, of), w_row(o.w, o.w_stride, of), x_row(o.a, of), w_row(o.c, o.c_stride, of),
                               x_row(o.p, of), w_row(o.r, o.r_stride, of)};
#pragma unroll
      for (int n = 0; n < P::spans; ++n) {
        const CopySpan span = P::span(n);
        const bool is_w = n >= P::x_spans;
        T* const to = rows(step, e) + (is_w ? L::x_row : 0);
#pragma unroll
        for (int t = 0; t < tangents; ++t) {
          if (is_w) copy_span<W>(to + t * (L::edge / tangents), from[2 * t + 1], span);
          else copy_span<T>(to + t * (L::edge / tangents), from[2 * t], span);
        }
      }
    }
  }
  template <class Element>
  EQ_FN void copy_span(T* to, const T* from, CopySpan span) const {
    copy_row(reinterpret_cast<Element*>(to) + span.staged, reinterpret_cast<const Element*>(from) + span.offset,
             span.length);
  }
  // Weights, in elements of T: spans that are copied in bulk begin at multiples of 16 bytes.
  static EQ_FN constexpr int of_weights(int count) { return count * int(sizeof(W)) / int(sizeof(T)); }
  EQ_FN static const T* x_row(const void* x, int2 id) { return static_cast<const T*>(x) + int64_t(id.y) * P::x_dim; }
  EQ_FN static const T* w_row(const void* w, int64_t stride, int2 id) {
    return reinterpret_cast<const T*>(static_cast<const W*>(w) + id.x * stride);
  }

  EQ_FN T* attributes(int step, int e) const {
    return shared + L::attributes + ((step % (L::stages + 1)) * L::edges + e) * P::y_dim * tangents;
  }
  EQ_FN void issue_attributes(int step) const {
    if (step >= steps || thread < 32 * helper) return;
    for (int t = thread - 32 * helper; t < count(step) * P::y_dim; t += L::threads - 32 * helper) {
      const int e = t / P::y_dim, j = t - e * P::y_dim;
      const int64_t from = int64_t(edge(step, e)) * P::y_dim + j;
      T* to = attributes(step, e) + j;
      copy_element(to, static_cast<const T*>(o.y) + from);
      if (has_tangents) copy_element(to + P::y_dim, static_cast<const T*>(o.b) + from);
      if (has_second) copy_element(to + 2 * P::y_dim, static_cast<const T*>(o.q) + from);
    }
  }

  EQ_FN T* entries(int step, int e) const {
    return shared + L::matrices + ((step & 1) * L::edges + e) * P::entries * tangents;
  }
  // Most entries have one term, and those of a thread do not wait for each other.
  EQ_FN void build_matrices(int step) const {
    if (step >= steps) return;
    const T* const y = attributes(step, 0);
    T* const out = entries(step, 0);
    if constexpr (L::holds_single) {
      if (thread < P::single) {
#pragma unroll
        for (int e = 0; e < L::edges; ++e)
          out[e * P::entries + single.entry] = single.factor * y[e * P::y_dim + single.j];
      }
    } else {
      build<1, P::single>(terms, y, out);
    }
    build<P::terms, P::several>(terms + (P::single - L::listed), y, out);
  }
  template <int count, int all>
  EQ_FN void build(const Term* table, const T* y, T* out) const {
    constexpr int rows = L::edges * tangents;
#pragma unroll 1
    for (int n = thread; n < all; n += L::threads) {
      T value[rows] = {};
#pragma unroll
      for (int t = 0; t < count; ++t) {
        const Term term = table[t * all + n];
#pragma unroll
        for (int row = 0; row < rows; ++row) value[row] += term.factor * y[row * P::y_dim + term.j];
      }
      const int entry = table[n].entry;
#pragma unroll
      for (int row = 0; row < rows; ++row) out[row * P::entries + entry] = value[row];
    }
  }

  // Warps of different segments wait in different places, which __syncthreads() does not allow and a barrier does.
  EQ_FN static void wait_for_block() { wait_for_warps(0, L::threads / 32); }

  // Makes the stage of `step` ready to read and starts later ones.
  EQ_FN void advance(int step) {
    wait_copies<L::stages - 2>();
    wait_for_block();
    publish_ids(step + L::stages + 1);
    look_up(step + L::stages + 2);
    issue_rows(step + L::stages - 1);
    issue_attributes(step + L::stages);
    commit_copies();
    build_matrices(step + 1);
#if EQ_BULK_COPY
    if constexpr (bulk) wait_barrier(barrier + 8 * (step % L::stages), (step / L::stages) & 1);
#endif
  }
};

}  // namespace

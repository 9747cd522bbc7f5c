// GPU prelude, second part: how the rows and edge matrices of a block's edges reach shared memory.
namespace {

constexpr int tangents = EQ_DIRECTION == 2 ? 2 : 1;
EQ_FN constexpr int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// Shared memory of a block, in elements; `KernelPlan.shared_bytes` counts the same.
template <class P>
struct Layout {
  static constexpr int edges = P::edges_per_stage, stages = P::stages, threads = 32 * (P::warps > 0 ? P::warps : 1);
  static constexpr int x_row = round_up(P::x_dim, 4), w_row = round_up(P::w_dim, 4);
  static constexpr int edge = (x_row + w_row) * tangents;  // x, w, then a, c
  static constexpr int matrices = stages * edges * edge;
  static constexpr int attributes = matrices + 2 * edges * P::entries * tangents;
  static constexpr int sums = attributes + round_up((stages + 1) * edges * P::y_dim * tangents, 4);
  static constexpr int sums_stage = edges * P::warps * P::y_dim;
  static constexpr int barriers = sums + (EQ_DIRECTION > 0 ? round_up(2 * sums_stage, 4) : 0);
  // After the barriers, in bytes: ids of edges and senders, then the table of the terms of edge matrices.
  static constexpr int id_stages = stages + 3, ids_bytes = 8 * ((edges * id_stages + 1) / 2 * 2);
};

// The edges of a block, brought to shared memory stage by stage.
template <class P>
struct Pipeline {
  typedef Layout<P> L;
  const eq_operands& o;
  T* shared;
  int thread, lane, warp;
  int first, last, steps;  // slots of the block
  int2* ids;                   // (edge, sender) of every slot of some stages
  T* factors;                  // of the terms of edge matrices
  int* indices;                // of y in these terms
  int2 next;                   // ids on their way to shared memory
#if EQ_BULK_COPY
  static constexpr bool bulk = P::x_dim * sizeof(T) % 16 == 0 && P::w_dim * sizeof(T) % 16 == 0 && L::edges <= 32;
  unsigned barrier;
  unsigned long long once, often;
#else
  static constexpr bool bulk = false;
#endif

  EQ_FN Pipeline(const eq_operands& o_, T* shared_, int first_, int last_)
      : o(o_), shared(shared_), thread(threadIdx.x), lane(threadIdx.x % 32), warp(threadIdx.x / 32), first(first_),
        last(last_), steps((last_ - first_ + L::edges - 1) / L::edges) {
    unsigned char* const tail = reinterpret_cast<unsigned char*>(shared + L::barriers) + 8 * (L::stages + L::stages % 2);
    ids = reinterpret_cast<int2*>(tail);
    factors = reinterpret_cast<T*>(tail + L::ids_bytes);
    indices = reinterpret_cast<int*>(factors + P::terms * P::entries);
    for (int t = thread; t < P::terms * P::entries; t += L::threads) {
      factors[t] = P::factor(t);
      indices[t] = P::index(t);
    }
    for (int t = thread; t < (L::stages + 1) * L::edges; t += L::threads) ids[t] = read_id(first + t);
    look_up(L::stages + 1);
#if EQ_BULK_COPY
    warp = __shfl_sync(0xffffffffu, warp, 0);
    barrier = shared_address(shared + L::barriers);
    once = read_once();
    often = read_often();
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

  // Edge (x) and sender (y) of edge e of a stage.
  EQ_FN int2 id(int step, int e) const { return ids[step % L::id_stages * L::edges + e]; }
  EQ_FN T* rows(int step, int e) const { return shared + ((step % L::stages) * L::edges + e) * L::edge; }
  EQ_FN int count(int step) const { return min(L::edges, last - first - step * L::edges); }

  EQ_FN int2 read_id(int slot) const {
    if (slot >= last) return make_int2(0, 0);
    return o.row_ptr ? make_int2(o.edge[slot], o.sender[slot]) : make_int2(slot, slot);
  }
  // Ids are read from device memory one step before they are published to the block.
  EQ_FN void look_up(int step) {
    if (thread < L::edges) next = read_id(first + step * L::edges + thread);
  }
  EQ_FN void publish_ids(int step) {
    if (thread < L::edges) ids[step % L::id_stages * L::edges + thread] = next;
  }

  EQ_FN void copy_row(T* to, const T* from, int elements) const {
    const bool wide = elements * sizeof(T) % 16 == 0 && reinterpret_cast<unsigned long long>(from) % 16 == 0;
    constexpr int width = 16 / sizeof(T);
    if (wide) {
      for (int n = thread * width; n < elements; n += L::threads * width) copy_16_bytes(to + n, from + n);
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
    const T *x = static_cast<const T*>(o.x), *w = static_cast<const T*>(o.w);
    const T *a = static_cast<const T*>(o.a), *c = static_cast<const T*>(o.c);
    const unsigned ready = barrier + 8 * (step % L::stages);
    constexpr unsigned x_bytes = P::x_dim * sizeof(T), w_bytes = P::w_dim * sizeof(T);
    if (lane == 0) expect_bytes(ready, count(step) * (x_bytes + w_bytes) * tangents);
    __syncwarp();
    if (lane < count(step)) {
      T* to = rows(step, lane);
      const int2 of = id(step, lane);
      if (w_bytes > 0) bulk_copy(to + L::x_row, w + of.x * o.w_stride, w_bytes, ready, once);
      bulk_copy(to, x + int64_t(of.y) * P::x_dim, x_bytes, ready, often);
      if (tangents > 1) {
        to += L::x_row + L::w_row;
        if (w_bytes > 0) bulk_copy(to + L::x_row, c + of.x * o.c_stride, w_bytes, ready, once);
        bulk_copy(to, a + int64_t(of.y) * P::x_dim, x_bytes, ready, often);
      }
    }
#endif
  }
  EQ_FN void issue_elements(int step) const {
    const T *x = static_cast<const T*>(o.x), *w = static_cast<const T*>(o.w);
    const T *a = static_cast<const T*>(o.a), *c = static_cast<const T*>(o.c);
    for (int e = 0; e < count(step); ++e) {
      const int64_t edge = id(step, e).x, sender = id(step, e).y;
      T* to = rows(step, e);
      copy_row(to, x + sender * P::x_dim, P::x_dim);
      copy_row(to + L::x_row, w + edge * o.w_stride, P::w_dim);
      if (tangents > 1) {
        to += L::x_row + L::w_row;
        copy_row(to, a + sender * P::x_dim, P::x_dim);
        copy_row(to + L::x_row, c + edge * o.c_stride, P::w_dim);
      }
    }
  }

  EQ_FN T* attributes(int step, int e) const {
    return shared + L::attributes + ((step % (L::stages + 1)) * L::edges + e) * P::y_dim * tangents;
  }
  EQ_FN void issue_attributes(int step) const {
    if (step >= steps) return;
    for (int t = thread; t < count(step) * P::y_dim; t += L::threads) {
      const int e = t / P::y_dim, j = t - e * P::y_dim;
      const int64_t from = int64_t(id(step, e).x) * P::y_dim + j;
      T* to = attributes(step, e) + j;
      copy_element(to, static_cast<const T*>(o.y) + from);
      if (tangents > 1) copy_element(to + P::y_dim, static_cast<const T*>(o.b) + from);
    }
  }

  EQ_FN T* entries(int step, int e) const {
    return shared + L::matrices + ((step & 1) * L::edges + e) * P::entries * tangents;
  }
  EQ_FN void build_matrices(int step) const {
    if (step >= steps) return;
    constexpr int rows = L::edges * tangents;
    for (int t = thread; t < rows * P::entries; t += L::threads) {
      const int row = t / P::entries, n = t - row * P::entries;
      const T* y = attributes(step, 0) + row * P::y_dim;
      T value = factors[n] * y[indices[n]];
      // Most entries have one term: the others end at a negative index.
      for (int term = 1; term < P::terms; ++term) {
        const int j = indices[term * P::entries + n];
        if (j < 0) break;
        value += factors[term * P::entries + n] * y[j];
      }
      entries(step, 0)[row * P::entries + n] = value;
    }
  }

  // Makes the stage of `step` ready to read and starts later ones.
  EQ_FN void advance(int step) {
    wait_copies<L::stages - 2>();
    __syncthreads();
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

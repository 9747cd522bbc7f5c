// GPU prelude: a lane is a thread that owns a few channels, a block owns the edges of consecutive receivers.
//
// Warps share a block's work as (segment, chunk of channels). Rows of x and w reach shared memory some stages ahead;
// the edge matrices of the next stage are built by all threads while this one is computed; outputs stay in registers
// until the receiver's last edge. Everything is added in a fixed order unless `atomic` asks otherwise.
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

// Channels of this thread inside the blocks of a segment.
template <class S>
struct Channels {
  static constexpr int n = S::lane_channels;
  int first;
  bool active;  // false past the last channel
  EQ_FN Channels(int warp_of_segment, int lane)
      : first((warp_of_segment * 32 + lane) * n), active(S::mul % (32 * n) == 0 || first < S::mul) {}
};

// ---- what a segment's edge() reads and writes

template <int n>
struct SharedRow {
  const T* row;
  bool active;
  EQ_FN LaneOf<n> at(int offset) const { return load<n>(row + offset, active); }
  EQ_FN LaneOf<n> at(int offset, int) const { return at(offset); }
};

template <int n, int d1, int mul>
struct XBlock {
  LaneOf<n> x_value[d1], a_value[d1], gx[d1];
  T* gx_row;
  bool active, atomic;
  EQ_FN LaneOf<n> x(int i, int) const { return x_value[i]; }
  EQ_FN LaneOf<n> a(int i, int) const { return a_value[i]; }
  EQ_FN void add(int i, int, LaneOf<n> value) { gx[i] = gx[i] + value; }
  EQ_FN void flush() const {
    if (!active) return;
#pragma unroll
    for (int i = 0; i < d1; ++i) {
      if (atomic) atomic_add(gx_row + i * mul, gx[i].v);
      else stream_store(gx_row + i * mul, gx[i].v);
    }
  }
};
template <int n>
struct Weight {
  LaneOf<n> w, c, gw;
  T* gw_row;
  bool active;
  EQ_FN LaneOf<n> at(int) const { return w; }
  EQ_FN LaneOf<n> tangent(int) const { return c; }
  template <bool first, bool>
  EQ_FN void add(int, LaneOf<n> value) {
    gw = first ? value : gw + value;
  }
  EQ_FN void flush() const {
    if (active) stream_store(gw_row, gw.v);
  }
};
template <class S>
struct EdgeRows {
  static constexpr int n = S::lane_channels;
  const T *x_row, *w_row, *a_row, *c_row;  // shared memory, at this lane's first channel
  T *gx_row, *gw_row;                      // device memory, likewise
  bool active, atomic;
  LaneOf<n>*gz, *ggz;  // registers
  template <int d1, int mul>
  EQ_FN XBlock<n, d1, mul> x_block(int offset) const {
    XBlock<n, d1, mul> block;
#pragma unroll
    for (int i = 0; i < d1; ++i) {
      block.x_value[i] = load<n>(x_row + offset + i * mul, active);
      if (tangents > 1) block.a_value[i] = load<n>(a_row + offset + i * mul, active);
      block.gx[i] = load<n>(nullptr, false);
    }
    block.gx_row = gx_row + offset;
    block.active = active;
    block.atomic = atomic;
    return block;
  }
  template <int mul>
  EQ_FN Weight<n> weight(int offset) const {
    Weight<n> weight;
    weight.w = load<n>(w_row + offset, active);
    if (tangents > 1) weight.c = load<n>(c_row + offset, active);
    weight.gw_row = gw_row + offset;
    weight.active = active;
    return weight;
  }
  template <int mul>
  EQ_FN LaneOf<n> g(int component, int, int) const {
    return gz[component];
  }
  template <int mul>
  EQ_FN LaneOf<n> z(int component, int, int) const {
    return ggz[component];
  }
  template <int mul>
  EQ_FN void set_z(int component, int, int, LaneOf<n> value) const {
    ggz[component] = value;
  }
};

// Adds v[0..n) over the lanes of a warp, leaving sum q in the lanes that ask for it: half the values change lanes at
// each level, so that 16 sums take 16 shuffles and not 80.
template <int n, int offset>
EQ_FN void add_over_lanes(T* v, int lane) {
  if constexpr (offset > 0) {
    constexpr int half = n / 2;
    if constexpr (n > 1) {
      const bool upper = lane & offset;
#pragma unroll
      for (int q = 0; q < half; ++q) {
        const T give = upper ? v[q] : v[q + half], keep = upper ? v[q + half] : v[q];
        v[q] = keep + shuffle_xor(give, offset);
      }
      add_over_lanes<half, offset / 2>(v, lane);
    } else {
      v[0] += shuffle_xor(v[0], offset);
      add_over_lanes<1, offset / 2>(v, lane);
    }
  }
}
EQ_FN constexpr int power_of_two(int value) { return value <= 1 ? 1 : 2 * power_of_two((value + 1) / 2); }
EQ_FN constexpr int log2_of(int value) { return value <= 1 ? 0 : 1 + log2_of(value / 2); }

template <class P, class S>
struct Worker {
  typedef Layout<P> L;
  static constexpr int n = S::lane_channels;
  Pipeline<P>& pipe;
  const eq_operands& o;
  const Channels<S> channels;
  LaneOf<n> z[EQ_DIRECTION == 1 ? 1 : S::outputs];
  LaneOf<n> g[EQ_DIRECTION == 0 ? 1 : S::outputs];

  EQ_FN Worker(Pipeline<P>& pipe_, int warp_of_segment)
      : pipe(pipe_), o(pipe_.o), channels(warp_of_segment, pipe_.lane) {}

  EQ_FN void begin(int receiver) {
#pragma unroll
    for (int k = 0; k < S::outputs; ++k) {
      if (EQ_DIRECTION != 1) z[k] = load<n>(nullptr, false);
      if (EQ_DIRECTION != 0)
        g[k] = load<n>(static_cast<const T*>(o.gz) + int64_t(receiver) * P::z_dim + S::z_offset(k) + channels.first,
                       channels.active);
    }
  }
  EQ_FN void finish(int receiver) {
    if (EQ_DIRECTION == 1 || !channels.active) return;
    T* row = static_cast<T*>(o.z) + int64_t(receiver) * P::z_dim + channels.first;
#pragma unroll
    for (int k = 0; k < S::outputs; ++k) stream_store(row + S::z_offset(k), z[k].v);
  }

  EQ_FN void run_edge(int step, int e, int slot) {
    const T* rows = pipe.rows(step, e) + channels.first;
    const T* entries = pipe.entries(step, e);
    if constexpr (EQ_DIRECTION == 0) {
      S::edge(SharedRow<n>{rows, channels.active}, SharedRow<n>{rows + L::x_row, channels.active}, entries, z);
    } else {
      constexpr int sums = power_of_two(P::y_dim);
      Sum gy[sums];
#pragma unroll
      for (int j = 0; j < sums; ++j) gy[j] = 0;
      const int2 id = pipe.id(step, e);
      const int64_t gx_row = o.atomic ? id.y : slot;
      T* gx = static_cast<T*>(o.row_ptr && !o.atomic ? o.workspace : o.gx);
      const T* tangent_rows = rows + L::x_row + L::w_row;
      EdgeRows<S> operands{rows,
                           rows + L::x_row,
                           tangent_rows,
                           tangent_rows + L::x_row,
                           gx + gx_row * P::x_dim + channels.first,
                           static_cast<T*>(o.gw) + int64_t(id.x) * P::w_dim + channels.first,
                           channels.active,
                           o.atomic != 0,
                           g,
                           z};
      S::edge(operands, entries, entries + P::entries, gy);
      add_over_lanes<sums, 16>(gy, pipe.lane);
      constexpr int shift = 5 - log2_of(sums < 32 ? sums : 32), each = sums < 32 ? 1 : sums / 32;
      T* to = pipe.shared + L::sums + (step & 1) * L::sums_stage + (e * P::warps + pipe.warp) * P::y_dim;
      if ((pipe.lane & ((1 << shift) - 1)) == 0) {
#pragma unroll
        for (int q = 0; q < each; ++q) {
          const int j = (pipe.lane >> shift) * each + q;
          if (j < P::y_dim) to[j] = gy[q];
        }
      }
    }
  }

  // Gradients of y of a finished stage: the warps' shares, in order.
  EQ_FN void write_attribute_gradients(int step) const {
    if (EQ_DIRECTION == 0 || step < 0 || step >= pipe.steps) return;
    const T* from = pipe.shared + L::sums + (step & 1) * L::sums_stage;
    for (int t = pipe.thread; t < pipe.count(step) * P::y_dim; t += L::threads) {
      const int e = t / P::y_dim, j = t - e * P::y_dim;
      T total = 0;
#pragma unroll
      for (int warp = 0; warp < P::warps; ++warp) total += from[(e * P::warps + warp) * P::y_dim + j];
      const int64_t edge = pipe.id(step, e).x;
      static_cast<T*>(o.gy)[edge * P::y_dim + j] = total;
    }
  }

  EQ_FN void run(int receiver, int last_receiver) {
    int end = o.row_ptr ? o.row_ptr[receiver + 1] : receiver + 1;
    begin(receiver);
#pragma unroll 1
    for (int step = 0; step < pipe.steps; ++step) {
      pipe.advance(step);
      write_attribute_gradients(step - 1);
#pragma unroll 1
      for (int e = 0; e < L::edges; ++e) {
        const int slot = pipe.first + step * L::edges + e;
        if (slot >= pipe.last) break;
        while (slot >= end) {
          finish(receiver++);
          end = o.row_ptr ? o.row_ptr[receiver + 1] : receiver + 1;
          begin(receiver);
        }
        run_edge(step, e, slot);
      }
    }
    if (EQ_DIRECTION > 0) {
      __syncthreads();
      write_attribute_gradients(pipe.steps - 1);
    }
    finish(receiver++);
    for (; receiver < last_receiver; ++receiver) {
      begin(receiver);
      finish(receiver);
    }
  }
};

EQ_FN int receiver_of(const eq_operands& o, int slot) {
  if (!o.row_ptr) return slot;
  int low = 0, high = o.num_receivers;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (o.row_ptr[middle] <= slot) low = middle;
    else high = middle;
  }
  return low;
}

// The backward leaves nothing behind for a receiver, so its blocks take equal shares of the edges; the others take
// `receivers` consecutive receivers each, whose outputs they own.
template <class P>
EQ_FN void run_block(const eq_operands& o, int receivers, T* shared) {
  int receiver, last_receiver, first, last;
  if (EQ_DIRECTION == 1) {
    first = o.num_edges * blockIdx.x / gridDim.x;
    last = o.num_edges * (blockIdx.x + 1) / gridDim.x;
    receiver = last_receiver = receiver_of(o, first);
  } else {
    receiver = blockIdx.x * receivers;
    last_receiver = min(int64_t(receiver) + receivers, o.num_receivers);
    first = o.row_ptr ? o.row_ptr[receiver] : receiver;
    last = o.row_ptr ? o.row_ptr[last_receiver] : last_receiver;
  }
  Pipeline<P> pipe(o, shared, first, last);
  int warps = 0;
  P::each_segment([&](auto segment) {
    typedef decltype(segment) S;
    if (pipe.warp >= warps && pipe.warp < warps + S::warps) {
      Worker<P, S> worker(pipe, pipe.warp - warps);
      worker.run(receiver, last_receiver);
    }
    warps += S::warps;
  });
}

// Calls run(position in the other layout) for element n of a row in the (2l+1, mul) layout.
struct MulIrPosition {
  int n, &position;
  EQ_FN void operator()(int offset, int mul, int dim) const {
    const int local = n - offset;
    if (local >= 0 && local < mul * dim) position = offset + local % mul * dim + local / mul;
  }
};
template <class P>
EQ_FN int mul_ir_position(int n, bool is_x) {
  int position = n;
  if (is_x) P::each_x_block(MulIrPosition{n, position});
  else P::each_z_block(MulIrPosition{n, position});
  return position;
}

template <class P>
EQ_FN void relayout(const T* from, T* to, int64_t rows, bool is_x, bool to_mul_ir) {
  const int dim = is_x ? P::x_dim : P::z_dim;
  for (int n = threadIdx.x; n < dim; n += blockDim.x) {
    const int other = mul_ir_position<P>(n, is_x);
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x)
      to[row * dim + (to_mul_ir ? other : n)] = from[row * dim + (to_mul_ir ? n : other)];
  }
}

// Adds the per-edge gradients of each sender in the order of its slots.
template <class P>
EQ_FN void collect(const eq_operands& o) {
  constexpr int width = P::x_dim % 4 == 0 && sizeof(T) == 4 ? 4 : P::x_dim % 2 == 0 ? 2 : 1;
  const T* from = static_cast<const T*>(o.workspace);
  const int64_t sender = blockIdx.x;
  const int begin = o.t_row_ptr[sender], end = o.t_row_ptr[sender + 1];
  const int column = (blockIdx.y * blockDim.x + threadIdx.x) * width;
  if (column >= P::x_dim) return;
  LaneOf<width> total = load<width>(nullptr, false);
#pragma unroll 4
  for (int t = begin; t < end; ++t) total = total + load<width>(from + int64_t(o.t_slot[t]) * P::x_dim + column, true);
  T* to = static_cast<T*>(o.gx) + sender * P::x_dim;
#pragma unroll
  for (int u = 0; u < width; ++u) to[o.mul_ir ? mul_ir_position<P>(column + u, true) : column + u] = total.v[u];
}

}  // namespace

// The kernels of a translation unit; csrc/runtime/gpu_kernel.cpp launches them.
#define EQ_EXPORT(P)                                                                                              \
  EQ_KERNEL void __launch_bounds__(Layout<P>::threads, EQ_RESIDENT(P::blocks_per_sm))                                          \
      eq_main(const EQ_PARAMETER eq_operands o, int receivers) {                                             \
    extern __shared__ __align__(128) unsigned char shared[];                                                      \
    run_block<P>(o, receivers, reinterpret_cast<T*>(shared));                                                     \
  }                                                                                                               \
  EQ_KERNEL void eq_relayout(const T* from, T* to, int64_t rows, int is_x, int to_mul_ir) {                       \
    relayout<P>(from, to, rows, is_x, to_mul_ir);                                                                 \
  }                                                                                                               \
  EQ_KERNEL void eq_collect(const EQ_PARAMETER eq_operands o) { collect<P>(o); }

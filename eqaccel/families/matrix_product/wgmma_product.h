// C = A B by wgmma, which compute capability 9.0 alone has.
//
// Blocks go over tiles of C. Of both factors, stages of `depth` terms are copied to shared memory ahead of their use; B
// comes split, in the order in which it is read. What limits the rate are the bytes that a multiprocessor takes from the
// L2 cache and gives to it, so B is to be read seldom:
//
// - A block that keeps B has one tile of columns, whose terms all stay in shared memory. Each of its two warpgroups goes
//   over tiles of rows of its own. They take turns, so that one multiplies while the other writes.
// - Where there are too many terms for this, a block goes over tiles of rows and columns, neighbouring columns first, and
//   both warpgroups work on the same tile. In a tall tile they pass over each stage of B twice, for other rows.
//
// Where rows of the left factor are sums of two rows of A, both come to shared memory, and are added in float32 when they
// are read from there: half the products of multiplying first, for the same bytes of A.
//
// Every element of C is the same sum in the same order in each of them.
//
// The body that follows has these numbers and the instruction in a struct `P`.
#pragma once
#include "factors.h"

namespace {

EQ_FN void add(float2& sum, float2 value) { sum.x += value.x, sum.y += value.y; }

// What a thread gives of a stage of A: for each eight columns, those of two rows eight apart, split.
template <class P>
struct Fragments {
  static constexpr int depth = P::depth, a_stride = P::a_stride;
  unsigned head[depth / 8][4], tail[P::parts == 2 ? depth / 8 : 1][4];

  // `others`: how far behind a row is the one that is added to it; 0 for none.
  template <int others>
  EQ_FN void read(const float* a) {
#pragma unroll
    for (int k = 0; k < depth / 8; ++k) {
      // The order of the terms in a sum is free: neighbours are read at once, and B is packed to match.
      float2 upper = *(const float2*)(a + 8 * k), lower = *(const float2*)(a + 8 * a_stride + 8 * k);
      if constexpr (others > 0) {
        add(upper, *(const float2*)(a + others + 8 * k));
        add(lower, *(const float2*)(a + others + 8 * a_stride + 8 * k));
      }
      const float values[4] = {upper.x, lower.x, upper.y, lower.y};
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        head[k][n] = head_of(values[n]);
        if constexpr (P::parts == 2) tail[k][n] = tail_of(values[n], head[k][n]);
      }
    }
  }
};

// The column of C that is summed at a place of the tensor core, where a thread has two neighbours of every eight: in
// this order these are four neighbours of C, which it writes at once.
EQ_FN int column_summed_at(int place) { return place / 16 * 16 + place % 8 / 2 * 4 + place % 16 / 8 * 2 + place % 2; }

// The order of B in a stage, (depth / 4, width, 4): eight terms are those of one multiplication.
struct WgmmaOrder {
  static EQ_FN Element element(int within, int width) {
    const int place = within % 4, column = within / 4 % width, quarter = within / 4 / width;
    return {quarter / 2 * 8 + 2 * place + quarter % 2, column_summed_at(column)};
  }
};

// Tells the tensor core where eight rows of B are: 8 x 4 floats lie together, the next columns follow, then the next
// four rows.
template <int width>
EQ_FN unsigned long long descriptor(unsigned address) {
  constexpr unsigned long long next_rows = width * 16 >> 4, next_columns = 128 >> 4;
  return (address & 0x3FFFF) >> 4 | next_rows << 16 | next_columns << 32;
}

template <class P, int width, int stages, int passes, bool keeps_b, bool adds_rows>
struct WgmmaProduct {
  static constexpr int depth = P::depth, a_stride = P::a_stride, block_threads = P::block_threads;
  static constexpr int warpgroup = 128, warpgroup_rows = 64, groups = keeps_b ? block_threads / warpgroup : 1;
  static constexpr int group_threads = block_threads / groups;  // those that share a tile
  static constexpr int pass_rows = group_threads / warpgroup * warpgroup_rows, height = passes * pass_rows;
  static constexpr int others = adds_rows ? height * a_stride : 0;  // floats from a row to the one that is added
  static constexpr int a_size = height * a_stride + others, b_size = P::parts * depth * width;  // floats of a stage
  // A stage is used, one is free to be overwritten, and the next must have come.
  static constexpr int in_flight = stages - 3;
  static constexpr int sums = width / 2;
  static_assert(groups <= 2 && passes <= 2 && (passes == 1 || !keeps_b) && width % 16 == 0);

  const float *a, *packed;
  const int2* summands;  // of each row, as csrc/runtime/matrix_product.h has them
  float* c;
  long long rows;
  int columns, terms, across, steps;
  float *a_stages, *b_stages;  // in shared memory
  int group, thread;  // within the group
  int tile, stride, total;  // `total`: stages of all tiles

  int load_tile = tile, load_step = 0, load_stage = 0, loaded = 0, step = 0, stage = 0;
  float sum[passes][sums] = {};

  EQ_FN long long first_row(int tile) const { return (long long)(keeps_b ? tile : tile / across) * height; }
  EQ_FN int column_tile(int tile) const { return (keeps_b ? (int)blockIdx.x : tile) % across; }

  EQ_FN void load() {
    if (loaded < total) {
      constexpr int quarters = depth / 4, rows_at_once = group_threads / quarters;
      const int row = thread / quarters, column = thread % quarters * 4, term = load_step * depth + column;
      const long long first = first_row(load_tile);
      const int last = (int)min((long long)height, rows - first) - 1;
      float* to = a_stages + load_stage * a_size + row * a_stride + column;
      if constexpr (adds_rows) {
        int2 of[height / rows_at_once];
#pragma unroll
        for (int i = 0; i < height / rows_at_once; ++i)
          of[i] = __ldg(summands + first + min(row + i * rows_at_once, last));
#pragma unroll
        for (int i = 0; i < height / rows_at_once; ++i, to += rows_at_once * a_stride) {
          const bool one = term < terms && of[i].y > -2, two = term < terms && of[i].y >= 0;
          copy_or_clear(to, one ? a + (long long)of[i].x * terms + term : a, one);
          copy_or_clear(to + others, two ? a + (long long)of[i].y * terms + term : a, two);
        }
      } else {
        const float* from = a + first * terms + term;
#pragma unroll
        for (int i = 0; i < height; i += rows_at_once)
          copy_or_clear(to + i * a_stride, term < terms ? from + (long long)min(row + i, last) * terms : a,
                        term < terms);
      }
      if constexpr (!keeps_b) load_b(load_stage, column_tile(load_tile) * steps + load_step, 1);
      ++loaded;
      if (++load_step == steps) load_step = 0, load_tile += stride;
      if (++load_stage == stages) load_stage = 0;
    }
    commit_copies();
  }

  // All threads of the block bring in stages of B.
  EQ_FN void load_b(int to, int from, int count) {
#pragma unroll
    for (int i = 4 * threadIdx.x; i < count * b_size; i += 4 * block_threads)
      copy_or_clear(b_stages + to * b_size + i, packed + (long long)from * b_size + i, true);
  }

  // What threads have copied is for the tensor core to read.
  EQ_FN void publish() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
  }

  template <int pending>
  EQ_FN void wait_for_stage() {
    wait_copies<pending>();
    if constexpr (keeps_b) {
      wait_for_warps(1 + group, group_threads / 32);
    } else {
      publish();
    }
  }

  // Turns: barrier 3 + group is for the group that takes its turn and the other one, which has passed it on.
  EQ_FN void take_turn() const { wait_for_warps(3 + group, block_threads / 32); }
  EQ_FN void pass_turn() const { asm volatile("bar.arrive %0, %1;" ::"r"(4 - group), "n"(block_threads) : "memory"); }

  EQ_FN void read(Fragments<P>& fragments, int pass) const {
    const int lane = thread % 32, row = pass * pass_rows + thread / 32 * 16 + lane / 4;
    fragments.template read<others>(a_stages + stage * a_size + row * a_stride + 2 * (lane % 4));
  }

  // Has the tensor core multiply a stage; what it adds to `part` is there after the wait for it.
  EQ_FN void begin_products(float (&part)[sums], const Fragments<P>& a) const {
    const unsigned head = shared_address(b_stages + (keeps_b ? step : stage) * b_size);
    const unsigned tail = head + depth * width * sizeof(float);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    if constexpr (P::parts == 2) {
#pragma unroll
      for (int k = 0; k < depth / 8; ++k) {
        const unsigned offset = k * 8 * width * sizeof(float);
        P::multiply_add(part, a.tail[k], descriptor<width>(head + offset), k > 0);
        P::multiply_add(part, a.head[k], descriptor<width>(tail + offset), true);
      }
    }
#pragma unroll
    for (int k = 0; k < depth / 8; ++k)
      P::multiply_add(part, a.head[k], descriptor<width>(head + k * 8 * width * sizeof(float)), P::parts == 2 || k > 0);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  }

  // One pass over a stage, while the next one is brought in.
  template <int pass>
  EQ_FN void advance(bool more, const Fragments<P>& now, Fragments<P>& next) {
    float part[sums];
    if (keeps_b && step == 0) take_turn();
    begin_products(part, now);
    if constexpr (pass < passes - 1) {
      read(next, pass + 1);
    } else {
      if (++stage == stages) stage = 0;
      if (++step == steps && keeps_b) pass_turn();  // what the other group begins now comes after this
      if (more) {
        wait_for_stage<in_flight>();
        load();
        read(next, 0);
      }
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < sums; ++i) {
      asm volatile("" : "+f"(part[i])::"memory");  // not before the wait
      sum[pass][i] += part[i];
    }
    if (pass < passes - 1 || step < steps) return;
#pragma unroll
    for (int n = 0; n < passes; ++n) write(n);
    step = 0;
    tile += stride;
  }

  EQ_FN void write(int pass) {
    const int lane = thread % 32, column = column_tile(tile) * width + 4 * (lane % 4);
    const long long row = first_row(tile) + pass * pass_rows + thread / 32 * 16 + lane / 4;
    const bool aligned = columns % 4 == 0;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float* to = c + (row + 8 * n) * columns + column;
#pragma unroll
      for (int i = 0; i < width / 16; ++i) {
        const int left = row + 8 * n < rows ? columns - column - 16 * i : 0;
        const float *sums_of = sum[pass] + 8 * i + 2 * n, four[4] = {sums_of[0], sums_of[1], sums_of[4], sums_of[5]};
        write_four(to + 16 * i, left, aligned, four);
      }
    }
#pragma unroll
    for (int i = 0; i < sums; ++i) sum[pass][i] = 0;
  }

  EQ_FN void run() {
    if constexpr (keeps_b) {
      load_b(0, column_tile(0) * steps, steps);
      commit_copies();
      wait_copies<0>();
      publish();
      if (group == 1) pass_turn();  // the first group begins; it has as many tiles as the other, or one more
      if (total == 0) return;
    }
    Fragments<P> even, odd;
    for (int i = 0; i < stages - 1; ++i) load();
    wait_for_stage<stages - 2>();
    read(even, 0);
#pragma unroll 1
    for (int i = 0; i < total; i += 2 / passes) {
      const bool more = i + 1 < total;
      advance<0>(more, even, odd);
      if constexpr (passes == 2) {
        advance<1>(more, odd, even);
      } else {
        if (more) advance<0>(i + 2 < total, odd, even);
      }
    }
  }
};

template <class P, int width, int stages, int passes, bool keeps_b, bool adds_rows>
EQ_FN void wgmma_product(const float* a, const float* packed, float* c, long long rows, int columns, int terms,
                         const int2* summands) {
  using Work = WgmmaProduct<P, width, stages, passes, keeps_b, adds_rows>;
  extern __shared__ __align__(128) float shared_memory[];
  const int across = (columns + width - 1) / width, steps = (terms + P::depth - 1) / P::depth;
  const int group = threadIdx.x / Work::group_threads, thread = threadIdx.x % Work::group_threads;
  const int tiles_down = (int)((rows + Work::height - 1) / Work::height);
  // Blocks that keep neighbouring tiles of columns go over the same rows.
  const int tiles = keeps_b ? tiles_down : tiles_down * across;
  const int first = keeps_b ? (int)blockIdx.x / across * Work::groups + group : (int)blockIdx.x;
  const int stride = keeps_b ? (int)gridDim.x / across * Work::groups : (int)gridDim.x;
  const int total = first < tiles ? (tiles - first + stride - 1) / stride * steps : 0;
  float* const a_stages = shared_memory + group * stages * Work::a_size;
  float* const b_stages = shared_memory + Work::groups * stages * Work::a_size;
  wait_for_previous();
  Work{a,     packed,   summands, c,     rows,   columns, terms,  across,
       steps, a_stages, b_stages, group, thread, first,   stride, total}
      .run();
}

}  // namespace

// csrc/runtime/matrix_product.cpp launches these.
#define EQ_EXPORT_WGMMA_PRODUCT(name, P, width, stages, passes, keeps_b, adds_rows)                                    \
  EQ_KERNEL void __launch_bounds__(P::block_threads, 1) name(                                                          \
      const float* a, const float* packed, float* c, long long rows, int columns, int terms, const int2* summands) {   \
    wgmma_product<P, width, stages, passes, keeps_b, adds_rows>(a, packed, c, rows, columns, terms, summands);         \
  }

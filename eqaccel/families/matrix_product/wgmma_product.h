// C = A B by wgmma, which compute capability 9.0 alone has.
//
// A block makes 128 rows of C at a time, 64 by each of its two warpgroups, one tile of columns after the other. B is packed
// in the order in which it is read: its stages go round in shared memory, where bulk copies bring them, which a thread of a
// third warpgroup begins as soon as all have done with what is overwritten. A warp of the two has 16 rows of A to itself:
//
// - Where these are needed for several tiles of columns, and have few terms, it splits them once, and keeps them in
//   registers. Meanwhile those that it needs next come to shared memory.
// - Else their stages go round in shared memory too, by copies of the warp's own, and are split while the tensor cores
//   multiply the one before. Warps wait for nothing but B. Where there are registers for two sets of sums, the tensor cores
//   are given a stage before the sums of the last one are added up, so that they always have something to do.
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

constexpr int most_overlapped_sums = 32;  // of a thread, of which it then has three sets of its 240 registers

EQ_FN void add(float4& sum, const float4& value) {
  sum.x += value.x, sum.y += value.y, sum.z += value.z, sum.w += value.w;
}

// What a thread gives of a stage of A: for each sixteen terms, four neighbours of two rows eight apart.
template <class P>
struct Fragments {
  static constexpr int sixteens = P::depth / 16;
  unsigned part[P::parts][sixteens][4];  // heads, then tails
  float scale[2];  // what sums of each row are to be multiplied by

  // `four(n, k)`: the neighbours of row n and of the k-th sixteen terms.
  template <class Four>
  EQ_FN void split(const Four& four) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float4 values[sixteens];
      float largest = 0;
#pragma unroll
      for (int k = 0; k < sixteens; ++k) {
        values[k] = four(n, k);
        largest = fmaxf(largest, largest_of(values[k]));
      }
      const Scale by = scale_of(largest_across(largest_across(largest, 1), 2));
      scale[n] = by.down;
#pragma unroll
      for (int k = 0; k < sixteens; ++k) {
        // The order of the terms in a sum is free: neighbours are read at once, and B is packed to match.
        const float4& v = values[k];
        const Split<P::parts> left(v.x * by.up, v.y * by.up), right(v.z * by.up, v.w * by.up);
#pragma unroll
        for (int i = 0; i < P::parts; ++i) part[i][k][n] = left.part[i], part[i][k][n + 2] = right.part[i];
      }
    }
  }
};

// A stage of B is (depth / 8, width, 8) halves; sixteen terms are those of one multiplication.
struct WgmmaOrder {
  // The n-th term of a unit.
  static EQ_FN int term(int unit, int n) { return unit / 2 * 16 + unit % 2 * 2 + n / 2 * 4 + n % 2; }
  // Of a tile, in units. Of every eight columns that the tensor core sums, a thread has two neighbours: in this order four
  // neighbours of C, which it writes at once, are its.
  static EQ_FN int place(int unit, int column, int width) {
    return unit * width + column / 16 * 16 + column % 4 / 2 * 8 + column % 16 / 4 * 2 + column % 2;
  }
};

// Tells the tensor core where eight terms of B are: those of eight columns lie together, the next columns follow, then the
// next eight terms.
template <int width>
EQ_FN unsigned long long descriptor(unsigned address) {
  constexpr unsigned long long next_terms = width * 16 >> 4, next_columns = 128 >> 4;
  return (address & 0x3FFFF) >> 4 | next_terms << 16 | next_columns << 32;
}

// The stages of a block, in their order: of all terms, for all tiles of columns of a share of C, for all its shares. Those
// of the same rows take turns in their tiles, so that neighbours are written at about the same time.
struct Walk {
  int across, steps, shares_across, shares;  // tiles of columns; stages of a tile; shares of the same rows; all shares
  int share, row_tile, column, step = 0;

  EQ_FN Walk(int across, int steps, int shares_across, int row_tiles)
      : across(across), steps(steps), shares_across(shares_across), shares(row_tiles * shares_across) {
    begin(blockIdx.x);
  }

  EQ_FN bool is_over() const { return share >= shares; }
  EQ_FN bool is_last_column() const { return column + shares_across >= across; }
  EQ_FN int stage_of_b() const { return column * steps + step; }

  EQ_FN void begin(int first) {
    share = first;
    row_tile = share / shares_across;
    column = share % shares_across;
    step = 0;
  }

  EQ_FN void next_share() { begin(share + gridDim.x); }

  EQ_FN void next_column() {
    step = 0;
    column += shares_across;
    if (column >= across) next_share();
  }

  EQ_FN void next() {
    if (++step == steps) next_column();
  }
};

// Registers of a thread, in a warpgroup that needs fewer or more than all have when they begin.
template <int count>
EQ_FN void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
EQ_FN void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

// A ring of stages: which is next, and whether it has been round an odd number of times.
template <int stages>
struct Ring {
  int stage = 0, odd = 0;

  EQ_FN void next() {
    if (++stage == stages) stage = 0, odd ^= 1;
  }
};

template <class P, int width, int stages, int kept_terms, bool adds_rows>
struct WgmmaProduct {
  static constexpr int depth = P::depth, warps = P::block_threads / 32 - 4, warp_rows = 16, height = warps * warp_rows;
  static constexpr int kept_stages = kept_terms / depth, stages_of_a = kept_terms > 0 ? kept_stages : stages;
  static constexpr int others = adds_rows ? warp_rows * depth : 0;  // floats from a row to the one that is added
  static constexpr int part_size = depth * width / 2, b_size = P::parts * part_size;  // floats of a stage of B
  static constexpr int a_size = warp_rows * depth + others;  // of a stage of A, of a warp
  static constexpr int sums = width / 2, rows_of_lane = warp_rows / 4;
  static_assert(width % 16 == 0 && kept_stages % 2 == 0);

  const float *a, *packed, *scales;
  const int2* summands;  // of each row, as csrc/runtime/matrix_product.h has them
  float* c;
  long long rows;
  int columns, terms, warp, lane;
  float *a_stages, *b_stages;  // in shared memory; of A, those of the warp
  unsigned barriers;  // of each stage of B: whether it has come, and whether all have done with it

  Walk at, of_a = at, of_b = at;  // what is multiplied next, and what is brought next
  Ring<stages> now = {}, done = {}, fed = {};  // of B: what is multiplied next, has been, and is brought next
  Ring<stages_of_a> read_from = {}, load_to = {};  // of A
  const float *own[rows_of_lane] = {}, *other[rows_of_lane] = {};  // what a lane brings of its rows, and adds to them
  unsigned present = 0;  // a bit for each of them
  float sum[sums] = {};

  EQ_FN unsigned has_come(int stage) const { return barriers + 16 * stage; }
  EQ_FN unsigned is_done(int stage) const { return barriers + 16 * stage + 8; }
  EQ_FN long long first_row(const Walk& walk) const { return (long long)walk.row_tile * height + warp * warp_rows; }

  // Begins to bring the next stage of B, once all have done with the one that it overwrites; by one thread.
  EQ_FN void bring_b() {
    wait_barrier(is_done(fed.stage), fed.odd ^ 1);  // does not wait in the first round
    expect_bytes(has_come(fed.stage), b_size * sizeof(float));
    bulk_copy(b_stages + fed.stage * b_size, packed + (long long)of_b.stage_of_b() * b_size, b_size * sizeof(float),
              has_come(fed.stage), read_often);
    fed.next();
    of_b.next();
  }

  // Finds the rows of a tile that a lane brings; past the last row, that one again.
  EQ_FN void find_rows_of_a() {
    const long long first = first_row(of_a) + lane / 8, last = rows - 1;
    const float* const begin = a + 4 * (lane % 8);
    present = 0;
#pragma unroll
    for (int i = 0; i < rows_of_lane; ++i) {
      const long long row = min(first + 4 * i, last);
      if constexpr (adds_rows) {
        const int2 of = __ldg(summands + row);
        own[i] = begin + (long long)max(of.x, 0) * terms;
        other[i] = begin + (long long)max(of.y, 0) * terms;
        present |= (of.y > -2) << i | (of.y >= 0) << (i + rows_of_lane);
      } else {
        own[i] = begin + row * terms;
      }
    }
  }

  // Begins to bring the next stage of A.
  EQ_FN void bring_a() {
    if (!of_a.is_over()) {
      if (of_a.step == 0) find_rows_of_a();
      const int row = lane / 8, quarter = lane % 8, term = of_a.step * depth;
      const bool inside = term + 4 * quarter < terms;
      const int from = inside ? term : 0;
      float* const to = a_stages + load_to.stage * a_size + place_of<depth>(row, quarter);
#pragma unroll
      for (int i = 0; i < rows_of_lane; ++i) {  // rows four apart are in the same places
        float* const place = to + i * 4 * depth;
        if constexpr (adds_rows) {
          copy_or_clear(place, own[i] + from, inside && (present >> i & 1));
          copy_or_clear(place + others, other[i] + from, inside && (present >> (i + rows_of_lane) & 1));
        } else {
          copy_or_clear(place, own[i] + from, inside);
        }
      }
      load_to.next();
      if constexpr (kept_terms > 0) {
        if (++of_a.step == kept_stages) of_a.next_share();
      } else {
        of_a.next();
      }
    }
    commit_copies();
  }

  // Splits the next stage of A that has come.
  EQ_FN void read(Fragments<P>& fragments) {
    const float* const from = a_stages + read_from.stage * a_size;
    fragments.split([&](int n, int k) {
      const float* const place = from + place_of<depth>(lane / 4 + 8 * n, 4 * k + lane % 4);
      float4 four = *(const float4*)place;
      if constexpr (adds_rows) add(four, *(const float4*)(place + others));
      return four;
    });
    read_from.next();
  }

  // Has the tensor core multiply a stage; what it adds to `part` is there after `end_products`.
  EQ_FN void begin_products(float (&part)[sums], const Fragments<P>& a) {
    constexpr int sixteens = depth / 16, stride = part_size * sizeof(float) / sixteens;
    wait_barrier(has_come(now.stage), now.odd);
    const unsigned head = shared_address(b_stages + now.stage * b_size), tail = head + part_size * sizeof(float);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    if constexpr (P::parts == 2) {
#pragma unroll
      for (int k = 0; k < sixteens; ++k) {
        P::multiply_add(part, a.part[1][k], descriptor<width>(head + k * stride), k > 0);
        P::multiply_add(part, a.part[0][k], descriptor<width>(tail + k * stride), true);
      }
    }
#pragma unroll
    for (int k = 0; k < sixteens; ++k)
      P::multiply_add(part, a.part[0][k], descriptor<width>(head + k * stride), P::parts == 2 || k > 0);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    now.next();
  }

  // `pending`: products that have been begun later.
  template <int pending>
  EQ_FN void end_products(float (&part)[sums], const Fragments<P>& a) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
    if (lane == 0) arrive(is_done(done.stage));
    done.next();
#pragma unroll
    for (int i = 0; i < sums; ++i) {
      asm volatile("" : "+f"(part[i])::"memory");  // not before the wait
      sum[i] = fmaf(part[i], a.scale[i / 2 % 2], sum[i]);
    }
  }

  EQ_FN void write() {
    const int column = at.column * width + 4 * (lane % 4);
    const long long row = first_row(at) + lane / 4;
    const bool aligned = columns % 4 == 0;
#pragma unroll
    for (int i = 0; i < width / 16; ++i) {
      const float4 scale = *(const float4*)(scales + column + 16 * i);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int left = row + 8 * n < rows ? columns - column - 16 * i : 0;
        const float *sums_of = sum + 8 * i + 2 * n, four[4] = {sums_of[0], sums_of[1], sums_of[4], sums_of[5]};
        write_four(c + (row + 8 * n) * columns + column + 16 * i, left, aligned, four, scale);
      }
    }
#pragma unroll
    for (int i = 0; i < sums; ++i) sum[i] = 0;
  }

  // By one thread, of a warp that does nothing else.
  EQ_FN void bring_all_of_b() {
    while (!of_b.is_over()) bring_b();
  }

  // While a stage is added up, the next one is multiplied.
  EQ_FN void run_with_kept_rows() {
    Fragments<P> kept[kept_stages];
    float part[2][sums];
    for (int n = 0; n < kept_stages; ++n) bring_a();
#pragma unroll 1
    while (!at.is_over()) {
      wait_copies<0>();
      __syncwarp();
#pragma unroll
      for (int n = 0; n < kept_stages; ++n) read(kept[n]);
      __syncwarp();  // all lanes have read what is overwritten
      for (int n = 0; n < kept_stages; ++n) bring_a();
      const int share = at.share;
#pragma unroll 1
      while (at.share == share) {
        begin_products(part[0], kept[0]);
#pragma unroll
        for (int n = 0; n < kept_stages - 1; ++n) {
          begin_products(part[(n + 1) % 2], kept[n + 1]);
          end_products<1>(part[n % 2], kept[n]);
        }
        end_products<0>(part[1], kept[kept_stages - 1]);
        write();
        at.next_column();
      }
    }
  }

  // Splits the next stage, which has come for all lanes then, and has another on its way, in the place of the one that all
  // have read. After the last stage it splits one that nobody multiplies.
  EQ_FN void prepare(Fragments<P>& next) {
    wait_copies<stages - 2>();
    __syncwarp();
    bring_a();
    read(next);
  }

  // Whether what is multiplied is the last stage of all.
  EQ_FN bool is_last() const { return at.share + gridDim.x >= at.shares && at.step == at.steps - 1; }

  EQ_FN void run_with_streamed_rows() {
    Fragments<P> even, odd;
    for (int n = 0; n < stages; ++n) bring_a();
    wait_copies<stages - 1>();
    __syncwarp();
    read(even);
    if constexpr (sums <= most_overlapped_sums) {
      multiply_overlapping(even, odd);
    } else {
      multiply_in_turn(even, odd);
    }
  }

  // After its products have been added up.
  EQ_FN void finish_stage() {
    if (at.step == at.steps - 1) write();
    at.next();
  }

  EQ_FN void multiply_in_turn(Fragments<P>& even, Fragments<P>& odd) {
    const auto advance = [&](const Fragments<P>& fragments, Fragments<P>& next) {
      float part[sums];
      begin_products(part, fragments);
      prepare(next);
      end_products<0>(part, fragments);
      finish_stage();
    };
#pragma unroll 1
    while (!at.is_over()) {
      advance(even, odd);
      if (!at.is_over()) advance(odd, even);
    }
  }

  EQ_FN void multiply_overlapping(Fragments<P>& even, Fragments<P>& odd) {
    float part_of_even[sums], part_of_odd[sums];
    // Whether there is another stage, which then is multiplied.
    const auto advance = [&](float (&part)[sums], const Fragments<P>& fragments, float (&next_part)[sums],
                             Fragments<P>& next) {
      if (is_last()) {
        end_products<0>(part, fragments);
        write();
        return false;
      }
      prepare(next);
      begin_products(next_part, next);
      end_products<1>(part, fragments);
      finish_stage();
      return true;
    };
    if (at.is_over()) return;
    begin_products(part_of_even, even);
#pragma unroll 1
    while (advance(part_of_even, even, part_of_odd, odd) && advance(part_of_odd, odd, part_of_even, even)) {
    }
  }
};

template <class P, int width, int stages, int kept_terms, bool adds_rows>
EQ_FN void wgmma_product(const float* a, const float* packed, float* c, long long rows, int columns, int terms,
                         const int2* summands, int shares_across) {
  using Work = WgmmaProduct<P, width, stages, kept_terms, adds_rows>;
  extern __shared__ __align__(128) float shared_memory[];
  const PackedB<P> b(columns, terms, width);
  const Walk walk(b.across, b.steps, shares_across, (int)((rows + Work::height - 1) / Work::height));
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float* const a_stages = shared_memory + stages * Work::b_size;
  constexpr int a_size = Work::stages_of_a * Work::a_size;
  Work work{a,
            packed,
            packed + b.scales(),
            summands,
            c,
            rows,
            columns,
            terms,
            warp,
            lane,
            a_stages + warp * a_size,
            shared_memory,
            shared_address(a_stages + Work::warps * a_size),
            walk};
  if (threadIdx.x == 0) {
    for (int n = 0; n < stages; ++n) init_barrier(work.has_come(n)), init_barrier(work.is_done(n), Work::warps);
    publish_barriers();
  }
  __syncthreads();
  wait_for_previous();
  if (warp >= Work::warps) {
    give_registers<24>();
    if (warp == Work::warps && lane == 0) work.bring_all_of_b();
  } else {
    take_registers<240>();
    if constexpr (kept_terms > 0) {
      work.run_with_kept_rows();
    } else {
      work.run_with_streamed_rows();
    }
  }
}

}  // namespace

// csrc/runtime/matrix_product.cpp launches these.
#define EQ_EXPORT_WGMMA_PRODUCT(name, P, width, stages, kept_terms, adds_rows)                                         \
  EQ_KERNEL void __launch_bounds__(P::block_threads, 1)                                                                \
      name(const float* a, const float* packed, float* c, long long rows, int columns, int terms,                      \
           const int2* summands, int shares_across) {                                                                  \
    wgmma_product<P, width, stages, kept_terms, adds_rows>(a, packed, c, rows, columns, terms, summands,               \
                                                           shares_across);                                             \
  }

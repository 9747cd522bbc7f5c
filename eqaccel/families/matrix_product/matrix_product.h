// C = A B on the tensor cores of sm_90a, with the accuracy of float32.
//
// Tensor cores multiply numbers of 11 bits (TensorFloat-32). A float is the sum of two of them, head and tail, to within
// 2^-22 of itself, so head head + head tail + tail head is a product to within 2^-20. Tensor cores cut sums off instead
// of rounding them, so they add no more than `depth` terms at a time, and the rest is added in float32.
//
// Blocks go over tiles of `height` rows and `width` columns of C, neighbouring columns first. Of both factors, stages of
// `depth` terms are copied to shared memory ahead of their use. B comes split, in the order in which it is read.
//
// The body that follows has these numbers and the instruction in a struct `P`.
#pragma once
#include "cuda.h"

namespace {

EQ_FN unsigned head_of(float x) {
  unsigned head;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(head) : "f"(x));
  return head;
}
EQ_FN unsigned tail_of(float x, unsigned head) { return head_of(x - __uint_as_float(head)); }

// Sixteen bytes, or zeros where there is nothing to copy.
EQ_FN void copy_or_clear(float* to, const float* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(inside ? 16 : 0)
               : "memory");
}

// What a thread gives of a stage of A: for each eight columns, those of two rows eight apart, split.
template <class P>
struct Fragments {
  static constexpr int depth = P::depth, a_stride = P::a_stride;
  unsigned head[depth / 8][4], tail[depth / 8][4];

  EQ_FN void read(const float* a) {
#pragma unroll
    for (int k = 0; k < depth / 8; ++k) {
      // The order of the terms in a sum is free: neighbours are read at once, and B is packed to match.
      const float2 upper = *(const float2*)(a + 8 * k), lower = *(const float2*)(a + 8 * a_stride + 8 * k);
      const float values[4] = {upper.x, lower.x, upper.y, lower.y};
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        head[k][n] = head_of(values[n]);
        tail[k][n] = tail_of(values[n], head[k][n]);
      }
    }
  }
};

// Tells the tensor core where eight rows of B are: 8 x 4 floats lie together, the next columns follow, then the next
// four rows.
template <int width>
EQ_FN unsigned long long descriptor(unsigned address) {
  constexpr unsigned long long next_rows = width * 16 >> 4, next_columns = 128 >> 4;
  return (address & 0x3FFFF) >> 4 | next_rows << 16 | next_columns << 32;
}

template <class P, int width>
struct Product {
  static constexpr int height = P::height, depth = P::depth, stages = P::stages, block_threads = P::block_threads;
  static constexpr int a_stride = P::a_stride, a_size = height * a_stride;  // floats of a stage of A
  static constexpr int in_flight =
      stages - 3;  // a stage is used, one is free to be overwritten, the next must have come
  static constexpr int b_size = depth * width, stage_size = a_size + 2 * b_size, sums = width / 2;

  const float *a, *packed;
  float* c;
  long long rows;
  int columns, terms, tiles_across, steps, total;
  float* shared;

  int load_tile, load_step = 0, load_stage = 0, loaded = 0;
  int tile, step = 0, stage = 0;
  float sum[sums] = {};

  EQ_FN void load() {
    if (loaded < total) {
      constexpr int across = depth / 4, rows_at_once = block_threads / across;
      const int row = threadIdx.x / across, column = threadIdx.x % across * 4, term = load_step * depth + column;
      const long long first = (long long)(load_tile / tiles_across) * height;
      const int last = (int)min((long long)height, rows - first) - 1;
      const float* from = a + first * terms + term;
      float* to = shared + load_stage * stage_size;
#pragma unroll
      for (int i = 0; i < height; i += rows_at_once)
        copy_or_clear(to + (row + i) * a_stride + column,
                      term < terms ? from + (long long)min(row + i, last) * terms : a, term < terms);
      from = packed + (long long)(load_tile % tiles_across * steps + load_step) * 2 * b_size;
#pragma unroll
      for (int i = 4 * threadIdx.x; i < 2 * b_size; i += 4 * block_threads)
        copy_or_clear(to + a_size + i, from + i, true);
      ++loaded;
      if (++load_step == steps) load_step = 0, load_tile += gridDim.x;
      if (++load_stage == stages) load_stage = 0;
    }
    commit_copies();
  }

  EQ_FN void wait_for_stage() {
    wait_copies<in_flight>();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the tensor core reads what threads have copied
    __syncthreads();
  }

  EQ_FN void read(Fragments<P>& fragments) const {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
    fragments.read(shared + stage * stage_size + row * a_stride + 2 * (lane % 4));
  }

  // One stage, while the next one is brought in.
  EQ_FN void advance(bool more, const Fragments<P>& now, Fragments<P>& next) {
    const unsigned head = shared_address(shared + stage * stage_size + a_size), tail = head + b_size * sizeof(float);
    float part[sums];
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    // The small products first: what is cut off is a part of the sum so far.
#pragma unroll
    for (int k = 0; k < depth / 8; ++k) {
      const unsigned offset = k * 8 * width * sizeof(float);
      P::multiply_add(part, now.tail[k], descriptor<width>(head + offset), k > 0);
      P::multiply_add(part, now.head[k], descriptor<width>(tail + offset), true);
    }
#pragma unroll
    for (int k = 0; k < depth / 8; ++k)
      P::multiply_add(part, now.head[k], descriptor<width>(head + k * 8 * width * sizeof(float)), true);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    if (++stage == stages) stage = 0;
    if (more) {
      wait_for_stage();
      load();
      read(next);
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < sums; ++i) {
      asm volatile("" : "+f"(part[i])::"memory");  // not before the wait
      sum[i] += part[i];
    }
    if (++step < steps) return;
    write();
    step = 0;
    tile += gridDim.x;
  }

  EQ_FN void write() {
    const int lane = threadIdx.x % 32, column = tile % tiles_across * width + 2 * (lane % 4);
    const long long row = (long long)(tile / tiles_across) * height + threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* to = c + (row + 8 * half) * columns + column;
#pragma unroll
      for (int i = 0; i < width / 8; ++i)
        if (row + 8 * half < rows && column + 8 * i < columns)
          *(float2*)(to + 8 * i) = make_float2(sum[4 * i + 2 * half], sum[4 * i + 2 * half + 1]);
    }
#pragma unroll
    for (int i = 0; i < sums; ++i) sum[i] = 0;
  }

  EQ_FN void run() {
    Fragments<P> even, odd;
    for (int i = 0; i < stages - 1; ++i) load();
    wait_copies<stages - 2>();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    read(even);
#pragma unroll 1
    for (int i = 0; i < total; i += 2) {
      advance(i + 1 < total, even, odd);
      if (i + 1 < total) advance(i + 2 < total, odd, even);
    }
  }
};

template <class P, int width>
EQ_FN void product(const float* a, const float* packed, float* c, long long rows, int columns, int terms) {
  extern __shared__ __align__(128) float shared_memory[];
  const int across = (columns + width - 1) / width, steps = (terms + P::depth - 1) / P::depth;
  const int tiles = (int)((rows + P::height - 1) / P::height) * across, first = blockIdx.x;
  const int total = (tiles - first + (int)gridDim.x - 1) / (int)gridDim.x * steps;
  Product<P, width>{a, packed, c, rows, columns, terms, across, steps, total, shared_memory, first, 0, 0, 0, first}
      .run();
}

// B, element (k, n) at k row_stride + n column_stride, as stages of depth x width: heads, then tails, each as
// (depth / 4, width, 4). Zeros beyond its edges.
template <int depth>
EQ_FN void pack(const float* b, float* packed, int columns, int terms, long long row_stride, long long column_stride,
                int width) {
  const int across = (columns + width - 1) / width, steps = (terms + depth - 1) / depth, size = depth * width;
  const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x, stage = i / size;
  if (stage >= (long long)across * steps) return;
  const int within = (int)(i % size), place = within % 4, column = within / 4 % width, quarter = within / 4 / width;
  const long long k = stage % steps * depth + quarter / 2 * 8 + 2 * place + quarter % 2;
  const long long n = stage / steps * width + column;
  const float value = k < terms && n < columns ? b[k * row_stride + n * column_stride] : 0;
  const unsigned head = head_of(value);
  float* to = packed + 2 * size * stage + within;
  to[0] = __uint_as_float(head);
  to[size] = __uint_as_float(tail_of(value, head));
}

}  // namespace

// csrc/runtime/matrix_product.cpp launches these.
#define EQ_EXPORT_PACK(P)                                                                                              \
  EQ_KERNEL void eq_pack(const float* b, float* packed, int columns, int terms, long long row_stride,                  \
                         long long column_stride, int width) {                                                         \
    pack<P::depth>(b, packed, columns, terms, row_stride, column_stride, width);                                       \
  }
#define EQ_EXPORT_PRODUCT(name, P, width)                                                                              \
  EQ_KERNEL void __launch_bounds__(P::block_threads, 1)                                                                \
      name(const float* a, const float* packed, float* c, long long rows, int columns, int terms) {                    \
    product<P, width>(a, packed, c, rows, columns, terms);                                                             \
  }

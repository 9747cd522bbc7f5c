// GPU prelude of linear maps: the rows of a block, those of the same attribute together.
//
// Rows are put in order within a part of them all that several blocks may share, each of which takes some.
#pragma once
#include "machine.h"
#include "warp_machine.h"

namespace {

constexpr int sorted_together = 64;  // rows, or as many as a block has

// Rows of one kind, which need no order.
struct PlainRows {
  static constexpr int kinds = 1;
  int64_t first;
  int count;

  EQ_FN int row(int place) const { return place < count ? place : -1; }
  EQ_FN int first_attribute(int) const { return 0; }
  EQ_FN int next_attribute(int z) const { return z; }
};

// Rows whose first attribute that is not zero is `kinds` - 1 if they have none.
template <int attributes>
struct RowsInOrder {
  static constexpr int kinds = attributes + 1;
  const int *rows, *keys;  // rows: -1 where there is none; keys: first attributes, by row
  const unsigned* present;
  int64_t first;  // of the part

  // The row in a place of the block, from the first one of the part on, or -1.
  EQ_FN int row(int place) const { return rows[place]; }
  EQ_FN int first_attribute(int place) const { return rows[place] < 0 ? kinds : keys[rows[place]]; }
  // The first attribute from z on that a row of the block has, or `kinds`.
  EQ_FN int next_attribute(int z) const {
    for (; z < kinds; z = (z / 32 + 1) * 32) {
      const unsigned left = present[z / 32] >> z % 32;
      if (left != 0) return z + first_lane(left);
    }
    return kinds;
  }
};

template <int attributes, int most_rows>
struct SortedRows {
  static constexpr int size = most_rows > sorted_together ? most_rows : sorted_together;
  static constexpr int words = attributes / 32 + 1;
  int keys[size], last[size], rows[size];  // first and last attribute
  unsigned present[words];

  // The rows of a block that takes so many.
  EQ_FN RowsInOrder<attributes> sort(const eq_operands& o, int block_rows, int64_t block) {
    const int together = block_rows > sorted_together ? block_rows : sorted_together, blocks = together / block_rows;
    const int64_t first = block / blocks * together;
    const int count = o.num_edges - first < together ? int(o.num_edges - first) : together;
    const T* y = static_cast<const T*>(o.y) + first * attributes;
    for (int i = threadIdx.x; i < together; i += blockDim.x) {
      keys[i] = i < count ? attributes : attributes + 1;
      last[i] = -1;
    }
    for (int i = threadIdx.x; i < words; i += blockDim.x) present[i] = 0;
    __syncthreads();
    find(y, count);
    __syncthreads();
    for (int i = threadIdx.x; i < together; i += blockDim.x) {
      int place = 0;
#pragma unroll 8
      for (int n = 0; n < together; ++n) place += keys[n] < keys[i] || (keys[n] == keys[i] && n < i);
      rows[place] = i < count ? i : -1;
    }
    __syncthreads();
    const int* mine = rows + block % blocks * block_rows;
    for (int i = threadIdx.x; i < block_rows; i += blockDim.x)
      if (mine[i] >= 0) note(y + int64_t(mine[i]) * attributes, keys[mine[i]], last[mine[i]]);
    __syncthreads();
    return {mine, keys, present, first};
  }

 private:
  // First and last attributes; many numbers are on their way from memory at once.
  EQ_FN void find(const T* y, int count) {
    constexpr int batch = 32;
    for (int begin = threadIdx.x; begin < count * attributes; begin += batch * blockDim.x) {
      unsigned found = 0;
#pragma unroll
      for (int n = 0; n < batch; ++n) {
        const int e = begin + n * int(blockDim.x);
        if (e < count * attributes && y[e] != 0) found |= 1u << n;
      }
      for (; found != 0; found &= found - 1) {
        const int e = begin + first_lane(found) * int(blockDim.x);
        atomicMin(&keys[e / attributes], e % attributes);
        atomicMax(&last[e / attributes], e % attributes);
      }
    }
  }
  // The attributes of a row.
  EQ_FN void note(const T* y, int first, int last) {
    atomicOr(&present[first / 32], 1u << first % 32);
    for (int z = first + 1; z <= last; ++z)
      if (y[z] != 0) atomicOr(&present[z / 32], 1u << z % 32);
  }
};

template <int most_rows>
struct SortedRows<0, most_rows> {
  EQ_FN PlainRows sort(const eq_operands& o, int block_rows, int64_t block) const {
    const int64_t first = block * block_rows, left = o.num_edges - first;
    return {first, left < block_rows ? int(left) : block_rows};
  }
};

}  // namespace

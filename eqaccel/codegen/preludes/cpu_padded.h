// CPU prelude: rows of which each component begins a SIMD vector, and parts of vectors.
#pragma once
#include "cpu.h"
#include "pairs.h"

namespace {

constexpr int padded(int count) { return (count + lanes - 1) / lanes * lanes; }
EQ_FN Lane get(const T* from) { return (Lane) * (const UnalignedLane*)from; }
EQ_FN void put(T* to, Lane value) { *(UnalignedLane*)to = value; }

// Elements c to c + lanes of `length`, as far as they exist.
template <int length>
EQ_FN Lane get_part(const T* from, int c) {
  return length % lanes == 0 || c + lanes <= length ? get(from + c) : load_first(from + c, length % lanes);
}
template <int length>
EQ_FN void put_part(T* to, int c, Lane value) {
  if (length % lanes == 0 || c + lanes <= length) put(to + c, value);
  else store_first(to + c, length % lanes, value);
}
EQ_FN T sum_of(Lane value) { return add_up<lanes>((const T*)&value); }

// ---- rows in memory of the thread: (2l+1, mul) in each block, components padded

template <class Rows>
struct PaddedRows {
  static constexpr int place(int block) {
    int at = 0;
    for (int n = 0; n < block; ++n) at += padded(Rows::block(n).mul) * Rows::block(n).dim;
    return at;
  }
  static constexpr int size = place(Rows::count);
  struct Table {
    int of[Rows::count + 1];
    constexpr Table() : of() {
      for (int n = 0; n < Rows::count; ++n) of[n] = place(n);
    }
  };
  static constexpr Table places{};

  // Paddings stay as they are.
  template <int n = 0>
  static EQ_FN void fill(const T* from, T* to, bool is_mul_ir) {
    if constexpr (n < Rows::count) {
      constexpr RowBlock b = Rows::block(n);
      constexpr int stride = padded(b.mul);
      const T* in = from + b.offset;
      T* out = to + places.of[n];
      if (is_mul_ir && b.dim > 1) {
        to_components(in, b.mul, b.dim, out, stride);
      } else {
        for (int i = 0; i < b.dim; ++i) memcpy(out + i * stride, in + i * b.mul, b.mul * sizeof(T));
      }
      fill<n + 1>(from, to, is_mul_ir);
    }
  }
  // With `adds` elements are added to those that are there.
  template <bool adds, int n = 0>
  static EQ_FN void empty(const T* from, T* to, bool is_mul_ir) {
    if constexpr (n < Rows::count) {
      constexpr RowBlock b = Rows::block(n);
      constexpr int stride = padded(b.mul);
      const T* in = from + places.of[n];
      T* out = to + b.offset;
      if (is_mul_ir && b.dim > 1) {
        to_channels<adds>(in, stride, b.mul, b.dim, out);
      } else {
        for (int i = 0; i < b.dim; ++i) to_channels<adds>(in + i * stride, stride, b.mul, 1, out + i * b.mul);
      }
      empty<adds, n + 1>(from, to, is_mul_ir);
    }
  }
};

}  // namespace

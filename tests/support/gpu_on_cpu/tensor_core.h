// The words of matrix_product/tensor_core.h on threads of a CPU, see cuda.h.
#pragma once
#include <cmath>

#include "cuda.h"

namespace {

constexpr unsigned cut_bits = 0x1FFF;  // those of a float that TensorFloat-32 has not

// Rounds to nearest, away from zero where two are as near.
unsigned head_of(float x) {
  const unsigned bits = __float_as_uint(x);
  return std::isfinite(x) ? (bits + (cut_bits + 1) / 2) & ~cut_bits : bits & ~cut_bits;
}

void copy_or_clear(float* to, const float* from, bool inside) {
  assert(reinterpret_cast<uintptr_t>(to) % 16 == 0 && reinterpret_cast<uintptr_t>(from) % 16 == 0);
  Copy copy{to, {}};
  if (inside) std::memcpy(copy.four, from, sizeof(copy.four));
  begun.push_back(copy);
}

// A sum is cut off, not rounded, as tensor cores do.
void multiply_add(float (&sum)[4], const unsigned (&a)[4], const unsigned* b, const float (&before)[4]) {
  Warp& warp = *warps[threadIdx.x / lanes_of_warp];
  const int lane = threadIdx.x % lanes_of_warp;
  for (int n = 0; n < 4; ++n) assert((a[n] & cut_bits) == 0 || std::isnan(__uint_as_float(a[n])));
  std::copy_n(a, 4, warp.a[turn][lane]);
  std::copy_n(b, 2, warp.b[turn][lane]);
  warp.together.arrive_and_wait();
  float result[4];
  for (int n = 0; n < 4; ++n) {
    const int row = lane / 4 + n / 2 * 8, column = lane % 4 * 2 + n % 2;
    double exact = before[n];
    for (int k = 0; k < 8; ++k)
      exact += double(__uint_as_float(warp.a[turn][row % 8 * 4 + k % 4][row / 8 + k / 4 * 2])) *
               __uint_as_float(warp.b[turn][column * 4 + k % 4][k / 4]);
    result[n] = static_cast<float>(exact);
    if (std::abs(static_cast<double>(result[n])) > std::abs(exact)) result[n] = std::nextafter(result[n], 0.0f);
  }
  std::copy_n(result, 4, sum);
  turn = 1 - turn;
}

}  // namespace

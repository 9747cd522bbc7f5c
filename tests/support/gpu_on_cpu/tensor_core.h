// The words of preludes/tensor_core.h on a CPU, see cuda.h.
#pragma once
#include <cmath>

#include "cuda.h"

namespace {

struct Halves {
  _Float16 first, second;
};

unsigned halves_of(float first, float second) {
  const Halves halves{static_cast<_Float16>(first), static_cast<_Float16>(second)};
  unsigned bits;
  std::memcpy(&bits, &halves, sizeof(bits));
  return bits;
}

float2 floats_of(unsigned bits) {
  Halves halves;
  std::memcpy(&halves, &bits, sizeof(bits));
  return {static_cast<float>(halves.first), static_cast<float>(halves.second)};
}

// One of 16 terms that four lanes have, two in each of the registers that are `stride` apart.
double term_of(const auto& lanes, int first_lane, int n, int k, int stride) {
  const float2 two = floats_of(lanes[first_lane + k % 8 / 2][n + k / 8 * stride]);
  return k % 2 ? two.y : two.x;
}

float of_lane(float x, int lane) { return shuffle(x, lane); }

void copy_or_clear(float* to, const float* from, bool inside) {
  assert(reinterpret_cast<uintptr_t>(to) % 16 == 0 && reinterpret_cast<uintptr_t>(from) % 16 == 0);
  Copy copy{to, {}};
  if (inside) std::memcpy(copy.four, from, sizeof(copy.four));
  gpu_block.current().begun.push_back(copy);
}

// A sum is cut off, not rounded, as tensor cores do.
void multiply_add(float (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[2], const float (&before)[4]) {
  Warp& warp = warps[threadIdx.x / lanes_of_warp];
  int& turn = gpu_block.current().turn;
  const int lane = threadIdx.x % lanes_of_warp;
  std::copy_n(a, 4, warp.a[turn][lane]);
  std::copy_n(b, 2, warp.b[turn][lane]);
  warp.together.arrive_and_wait();
  float result[4];
  for (int n = 0; n < 4; ++n) {
    const int row = lane / 4 + n / 2 * 8, column = lane % 4 * 2 + n % 2;
    double exact = before[n];
    for (int k = 0; k < 16; ++k)
      exact += term_of(warp.a[turn], row % 8 * 4, row / 8, k, 2) * term_of(warp.b[turn], column * 4, 0, k, 1);
    result[n] = static_cast<float>(exact);
    if (std::abs(static_cast<double>(result[n])) > std::abs(exact)) result[n] = std::nextafter(result[n], 0.0f);
  }
  std::copy_n(result, 4, sum);
  turn = 1 - turn;
}

template <bool transposed>
void read_matrices(unsigned (&matrix)[4], const unsigned short* row) {
  const auto& all = shown(row);
  const int lane = threadIdx.x % lanes_of_warp;
  for (int n = 0; n < 4; ++n)
    for (int half = 0; half < 2; ++half) {
      const int of_row = transposed ? lane % 4 * 2 + half : lane / 4,
                column = transposed ? lane / 4 : lane % 4 * 2 + half;
      const unsigned short* from;
      std::memcpy(&from, all[8 * n + of_row], sizeof(from));
      std::memcpy(reinterpret_cast<unsigned short*>(&matrix[n]) + half, from + column, sizeof(*from));
    }
}

float exp2_approx(float x) { return std::exp2(x); }
float reciprocal_approx(float x) { return 1 / x; }

}  // namespace

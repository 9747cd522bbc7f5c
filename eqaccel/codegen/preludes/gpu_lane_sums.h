// GPU: sums over the lanes of a warp.
#pragma once
#include "gpu_lane.h"
#include "machine.h"

namespace {

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

}  // namespace

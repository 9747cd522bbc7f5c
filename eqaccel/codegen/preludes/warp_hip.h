// HIP prelude: what 32 lanes do together, half of a wavefront of 64 or a whole one.
#pragma once
#include "hip.h"

namespace {

// A bit for each lane of which a condition holds.
EQ_FN unsigned lanes_with(bool condition) {
  const unsigned long long lanes = __ballot(condition);
  return static_cast<unsigned>(threadIdx.x % warpSize < 32 ? lanes : lanes >> 32);
}
EQ_FN int first_lane(unsigned lanes) { return __ffs(lanes) - 1; }
// What a lane has written to shared memory before, the others read afterwards: a wavefront does these in order, so that
// the compiler alone has to be kept from changing it.
EQ_FN void meet_lanes() {
  __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
  __builtin_amdgcn_wave_barrier();
}

}  // namespace

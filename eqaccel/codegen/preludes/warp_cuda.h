// CUDA prelude: what the 32 lanes of a warp do together.
#pragma once
#include "cuda.h"

namespace {

// A bit for each lane of which a condition holds.
EQ_FN unsigned lanes_with(bool condition) { return __ballot_sync(0xffffffffu, condition); }
EQ_FN int first_lane(unsigned lanes) { return __ffs(lanes) - 1; }
// What a lane has written to shared memory before, the others read afterwards.
EQ_FN void meet_lanes() { __syncwarp(); }

}  // namespace

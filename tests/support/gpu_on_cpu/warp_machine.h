// What the lanes of a warp do together, on threads of a CPU, see cuda.h.
#pragma once
#include <bit>
#include <map>
#include <mutex>

#include "machine.h"

namespace {

// Barriers of some lanes of a warp, a block being one warp: by these lanes.
std::map<unsigned, std::unique_ptr<std::barrier<>>> barriers_of_lanes;
std::mutex of_barriers_of_lanes;

void __syncwarp(unsigned lanes = ~0u) {
  std::barrier<>* together;
  {
    const std::lock_guard lock(of_barriers_of_lanes);
    auto& made = barriers_of_lanes[lanes];
    if (!made) made = std::make_unique<std::barrier<>>(std::popcount(lanes));
    together = made.get();
  }
  together->arrive_and_wait();
}
void meet_lanes() { __syncwarp(); }
unsigned lanes_with(bool condition) { return ballot(condition); }
int first_lane(unsigned lanes) { return std::countr_zero(lanes); }

}  // namespace

// What the lanes of a warp do together, on a CPU, see cuda.h.
#pragma once
#include <bit>
#include <map>

#include "machine.h"

namespace {

// Barriers of some lanes of a warp, a block being one warp: by these lanes.
std::map<unsigned, GpuBarrier> barriers_of_lanes;

GpuBarrier& barrier_of(unsigned lanes) {
  const Unwatched scope;
  return barriers_of_lanes.try_emplace(lanes, unsigned(std::popcount(lanes))).first->second;
}

void __syncwarp(unsigned lanes = ~0u) { barrier_of(lanes).arrive_and_wait(); }
void meet_lanes() { __syncwarp(); }
unsigned lanes_with(bool condition) { return ballot(condition); }
int first_lane(unsigned lanes) { return std::countr_zero(lanes); }

}  // namespace

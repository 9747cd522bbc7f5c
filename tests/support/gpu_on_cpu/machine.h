// The words of a GPU's machine.h that the kernels of neighbours are written in, on threads of a CPU, see cuda.h.
#pragma once
#include <bit>
#include <cmath>

#include "cuda.h"

typedef EQ_SCALAR T;

inline int2 make_int2(int x, int y) { return {x, y}; }

namespace {

int __popc(unsigned bits) { return std::popcount(bits); }

// What each lane of a warp shows the others.
template <class V>
const auto& shown(V value) {
  Warp& warp = *warps[threadIdx.x / lanes_of_warp];
  auto& all = warp.a[turn];
  static_assert(sizeof(V) <= sizeof(all[0]));
  std::memcpy(all[threadIdx.x % lanes_of_warp], &value, sizeof(V));
  warp.together.arrive_and_wait();
  turn = 1 - turn;
  return all;
}

unsigned ballot(bool condition) {
  const auto& conditions = shown<unsigned>(condition);
  unsigned lanes = 0;
  for (int lane = 0; lane < lanes_of_warp; ++lane) lanes |= conditions[lane][0] << lane;
  return lanes;
}

template <class V>
V shuffle_xor(V value, int mask) {
  V other;
  std::memcpy(&other, shown(value)[threadIdx.x % lanes_of_warp ^ mask], sizeof(V));
  return other;
}

}  // namespace

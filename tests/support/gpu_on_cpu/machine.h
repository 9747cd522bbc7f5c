// The words of a GPU's machine.h that the kernels of neighbours are written in, on a CPU, see cuda.h.
#pragma once
#include <bit>
#include <cmath>

#include "cuda.h"

typedef EQ_SCALAR T;

inline int2 make_int2(int x, int y) { return {x, y}; }

namespace {

int __popc(unsigned bits) { return std::popcount(bits); }

unsigned ballot(bool condition) {
  const auto& conditions = shown<unsigned>(condition);
  unsigned lanes = 0;
  for (int lane = 0; lane < lanes_of_warp; ++lane) lanes |= conditions[lane][0] << lane;
  return lanes;
}

}  // namespace

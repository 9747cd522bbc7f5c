// The words that kernels of linear maps are written in beside those of machine.h, on a CPU, see cuda.h.
#pragma once
#include "abi.h"
#include "machine.h"
#include "warp_machine.h"

#define EQ_PARAMETER
#define EQ_RESIDENT(blocks) (blocks)
#define __constant__
#undef __shared__
#define __shared__ static  // one for all threads

namespace {

void copy_16_bytes(T* to, const T* from) {
  const Unwatched scope;
  Copy& copy = gpu_block.current().begun.emplace_back(Copy{reinterpret_cast<float*>(to), {}});
  std::memcpy(copy.four, from, sizeof(copy.four));
}
void copy_element(T* to, const T* from) { *to = *from; }
void atomicMin(int* to, int value) { *to = std::min(*to, value); }
void atomicMax(int* to, int value) { *to = std::max(*to, value); }
void atomicOr(unsigned* to, unsigned value) { *to |= value; }

}  // namespace

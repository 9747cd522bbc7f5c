// HIP prelude: what gpu.h needs of the machine, in HIP's words. Copies to LDS pass through registers.
#pragma once
#ifndef __HIPCC_RTC__
#include <hip/hip_runtime.h>
#endif
#include "abi.h"

#define EQ_FN __device__ __forceinline__
#define EQ_CONSTANT __constant__ const
#define EQ_KERNEL extern "C" __global__
#define EQ_PARAMETER
#define EQ_BULK_COPY 0
#define EQ_RESIDENT(blocks) 1
#define EQ_INLINED

namespace {

typedef EQ_SCALAR T;

EQ_FN void copy_element(T* to, const T* from) { *to = *from; }
EQ_FN void copy_16_bytes(T* to, const T* from) {
  constexpr int count = 16 / sizeof(T);
#pragma unroll
  for (int n = 0; n < count; ++n) to[n] = from[n];
}
EQ_FN void commit_copies() {}
template <int pending>
EQ_FN void wait_copies() {}

EQ_FN void prefetch_line(const T*) {}

// No kernel is launched before the one before it has ended.
EQ_FN void let_next_begin() {}
EQ_FN void wait_for_previous() {}

// A value that the compiler takes for another one each time, so that it keeps nothing that follows from it in registers.
EQ_FN int computed_again(int value) {
  asm("" : "+v"(value));
  return value;
}

// A wavefront of 64 threads runs two groups of 32 lanes.
template <class V>
EQ_FN V shuffle_xor(V value, int mask) {
  return __shfl_xor(value, mask, 32);
}
EQ_FN unsigned ballot(bool condition) {
  const unsigned long long lanes = __ballot(condition);
  return static_cast<unsigned>(threadIdx.x % warpSize < 32 ? lanes : lanes >> 32);
}

#define EQ_WARP_BARRIERS 0
EQ_FN void wait_for_warps(int, int) { __syncthreads(); }

EQ_FN void store(T* p, T value) { *p = value; }
template <int n>
EQ_FN void stream_store(T* p, const T (&v)[n]) {
#pragma unroll
  for (int u = 0; u < n; ++u) __builtin_nontemporal_store(v[u], p + u);
}
template <int n>
EQ_FN void atomic_add(T* p, const T (&v)[n]) {
#pragma unroll
  for (int u = 0; u < n; ++u) atomicAdd(p + u, v[u]);
}

}  // namespace

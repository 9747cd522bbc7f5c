// A block of a GPU on a CPU, in place of preludes/cuda.h: a few words of it, for kernels in float32.
//
// Copies in the background are made when they are waited for, as late as they may be, so that what is read too early is
// not there; shared memory begins as NaN.
#pragma once
#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "lanes.h"

#define EQ_FN inline
#define EQ_KERNEL
#define __launch_bounds__(...)
#define __shared__
#define __align__(bytes) __attribute__((aligned(bytes)))

struct int2 {
  int x, y;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline void __stcs(float4* to, const float4& value) { *to = value; }
inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
using std::max;
using std::min;

inline Index blockIdx, blockDim, gridDim;

namespace {

constexpr int lanes_of_warp = 32;

// What 163 KiB hold, the most that a block of compute capability 8.0 may take.
alignas(128) float shared_memory[163 * 256];

// What the lanes of a warp show each other, in two places that take turns.
struct Warp {
  GpuBarrier together{lanes_of_warp};
  unsigned a[2][lanes_of_warp][4], b[2][lanes_of_warp][2];
};
std::unique_ptr<GpuBarrier> block_barrier;
std::vector<Warp> warps;

// What each lane of a warp shows the others.
template <class V>
const auto& shown(V value) {
  Warp& warp = warps[(threadIdx.y * blockDim.x + threadIdx.x) / lanes_of_warp];
  int& turn = gpu_block.current().turn;
  auto& all = warp.a[turn];
  static_assert(sizeof(V) <= sizeof(all[0]));
  std::memcpy(all[threadIdx.x % lanes_of_warp], &value, sizeof(V));
  warp.together.arrive_and_wait();
  turn = 1 - turn;
  return all;
}

template <class V>
V shuffle(V value, int lane) {
  V other;
  std::memcpy(&other, shown(value)[lane], sizeof(V));
  return other;
}
template <class V>
V shuffle_xor(V value, int mask) {
  return shuffle(value, threadIdx.x % lanes_of_warp ^ mask);
}

void __syncthreads() { block_barrier->arrive_and_wait(); }

void commit_copies() {
  GpuThread& lane = gpu_block.current();
  lane.committed.push_back(std::move(lane.begun));
  lane.begun.clear();
}
template <int pending>
void wait_copies() {
  auto& committed = gpu_block.current().committed;
  for (; committed.size() > pending; committed.erase(committed.begin()))
    for (const Copy& copy : committed.front()) std::memcpy(copy.to, copy.four, sizeof(copy.four));
}

// A kernel runs when the one before it has ended.
void let_next_begin() {}
void wait_for_previous() {}

// Runs a kernel, block after block, each of (threads, rows) threads; a row is whole warps.
template <class Kernel>
void launch(unsigned blocks, unsigned threads, const Kernel& kernel, unsigned rows = 1) {
  gridDim = {blocks, 1}, blockDim = {threads, rows};
  for (blockIdx = {}; blockIdx.x < blocks; ++blockIdx.x) {
    std::fill(std::begin(shared_memory), std::end(shared_memory), std::numeric_limits<float>::quiet_NaN());
    block_barrier = std::make_unique<GpuBarrier>(threads * rows);
    warps.assign(threads * rows / lanes_of_warp, Warp());
    gpu_block.run(blockIdx.x, threads, rows, kernel);
  }
}

}  // namespace

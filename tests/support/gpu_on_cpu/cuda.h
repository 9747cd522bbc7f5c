// A block of a GPU on threads of a CPU, in place of preludes/cuda.h: a few words of it, for kernels in float32.
//
// Copies in the background are made when they are waited for, as late as they may be, so that what is read too early is
// not there; shared memory begins as NaN.
#pragma once
#include <algorithm>
#include <barrier>
#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#define EQ_FN inline
#define EQ_KERNEL
#define __launch_bounds__(...)
#define __shared__
#define __align__(bytes) __attribute__((aligned(bytes)))

struct Index {
  unsigned x = 0, y = 0;
};
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

inline thread_local Index threadIdx, blockIdx;
inline Index blockDim, gridDim;

namespace {

constexpr int lanes_of_warp = 32;

// What 163 KiB hold, the most that a block of compute capability 8.0 may take.
alignas(128) float shared_memory[163 * 256];

struct Copy {
  float* to;
  float four[4];
};
thread_local std::vector<Copy> begun;
thread_local std::deque<std::vector<Copy>> committed;

// What the lanes of a warp show each other, in two places that take turns.
struct Warp {
  std::barrier<> together{lanes_of_warp};
  unsigned a[2][lanes_of_warp][4], b[2][lanes_of_warp][2];
};
inline std::unique_ptr<std::barrier<>> block_barrier;
inline std::vector<std::unique_ptr<Warp>> warps;
thread_local int turn = 0;

// What each lane of a warp shows the others.
template <class V>
const auto& shown(V value) {
  Warp& warp = *warps[(threadIdx.y * blockDim.x + threadIdx.x) / lanes_of_warp];
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
  committed.push_back(begun);
  begun.clear();
}
template <int pending>
void wait_copies() {
  for (; committed.size() > pending; committed.pop_front())
    for (const Copy& copy : committed.front()) std::memcpy(copy.to, copy.four, sizeof(copy.four));
}

// A kernel runs when the one before it has ended.
void let_next_begin() {}
void wait_for_previous() {}

// Runs a kernel, block after block, each of (threads, rows) threads; a row is whole warps.
template <class Kernel>
void launch(unsigned blocks, unsigned threads, const Kernel& kernel, unsigned rows = 1) {
  gridDim = {blocks, 1}, blockDim = {threads, rows};
  for (unsigned block = 0; block < blocks; ++block) {
    std::fill(std::begin(shared_memory), std::end(shared_memory), std::numeric_limits<float>::quiet_NaN());
    block_barrier = std::make_unique<std::barrier<>>(threads * rows);
    warps.clear();
    for (unsigned n = 0; n < threads * rows / lanes_of_warp; ++n) warps.push_back(std::make_unique<Warp>());
    std::vector<std::thread> running;
    for (unsigned thread = 0; thread < threads * rows; ++thread)
      running.emplace_back([&, thread] {
        threadIdx = {thread % threads, thread / threads}, blockIdx = {block, 0};
        kernel();
      });
    for (std::thread& thread : running) thread.join();
  }
}

}  // namespace

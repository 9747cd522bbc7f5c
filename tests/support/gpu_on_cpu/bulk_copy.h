// What kernels that copy whole rows ask of a GPU of compute capability 9.0, on a CPU, see cuda.h.
//
// A copy is made as soon as it is asked for, or as late as it may be, when somebody waits for it.
#pragma once
#include <map>
#include <utility>

#include "machine.h"
#include "warp_machine.h"

#define EQ_BULK_COPY 1
#define EQ_ASYNC_COPY 1
#define EQ_WARP_BARRIERS 1
#define EQ_CONSTANT const
#define EQ_PARAMETER
#define EQ_RESIDENT(blocks) (blocks)
#define EQ_INLINED
#define __device__
#define __noinline__ __attribute__((noinline))

alignas(128) inline unsigned char shared[227 * 1024];

namespace {

bool copies_are_late = true;

unsigned shared_address(const void* p) { return unsigned(static_cast<const unsigned char*>(p) - shared); }

struct BulkCopy {
  void* to;
  const void* from;
  unsigned bytes;
  void make() const { std::memcpy(to, from, bytes); }
};
// A barrier in shared memory: what has arrived since its last phase ended.
struct CopyBarrier {
  unsigned expected = 0, arrived = 0, phase = 0;
  int64_t missing = 0;  // bytes that were announced and not asked for
  std::vector<BulkCopy> waiting;

  void arrive(int64_t announced) {
    tell_arrival(this);
    const Unwatched scope;
    ++arrived, missing += announced;
  }
  void copy(const BulkCopy& copy, bool late) {
    if (!late) copy.make();
    tell_arrival(this);
    const Unwatched scope;
    missing -= copy.bytes;
    if (late) waiting.push_back(copy);
  }
  void wait(unsigned parity) {
    for (; (phase & 1) == parity; gpu_block.yield()) {
      tell_wait(this);
      for (const BulkCopy& copy : end_phase()) copy.make();
      tell_arrival(this);
    }
    tell_wait(this);
  }

 private:
  // The copies that are left to make, if it has ended.
  std::vector<BulkCopy> end_phase() {
    const Unwatched scope;
    if (arrived < expected || missing != 0) return {};
    arrived = 0, ++phase;
    return std::exchange(waiting, {});
  }
};
std::map<unsigned, CopyBarrier> copy_barriers;

CopyBarrier& copy_barrier(unsigned address) {
  const Unwatched scope;
  return copy_barriers[address];
}

// Shared memory begins as NaN.
constexpr unsigned char untouched = 0xff;
void begin_block() {
  std::fill(std::begin(shared), std::end(shared), untouched);
  copy_barriers.clear();
}

void init_barrier(unsigned barrier, unsigned arrivals = 1) {
  CopyBarrier& made = copy_barrier(barrier);
  made.expected = arrivals, made.arrived = made.phase = 0;
}
void expect_bytes(unsigned barrier, unsigned bytes) { copy_barrier(barrier).arrive(bytes); }
void arrive(unsigned barrier) { expect_bytes(barrier, 0); }
void wait_barrier(unsigned barrier, unsigned parity) { copy_barrier(barrier).wait(parity); }
void publish_barriers() {}
void publish_to_copies() {}

constexpr unsigned long long read_once = 0, read_often = 1;
void bulk_copy(T* to, const T* from, unsigned bytes, unsigned barrier, unsigned long long) {
  assert(reinterpret_cast<uintptr_t>(to) % 16 == 0 && reinterpret_cast<uintptr_t>(from) % 16 == 0 && bytes % 16 == 0);
  copy_barrier(barrier).copy({to, from, bytes}, copies_are_late);
}

// Of kernels that are here, but are not run.
void wait_for_warps(int, int) { assert(false); }
int __syncthreads_or(int) { return assert(false), 0; }
template <class V>
V __shfl_sync(unsigned, V value, int lane) {
  return shuffle(value, lane);
}
template <class V>
void copy_element(V* to, const V* from) {
  *to = *from;
}
void copy_16_bytes(T* to, const T* from) { std::memcpy(to, from, 16); }

T __ldg(const T* from) { return *from; }
void atomicAdd(T* to, T value) { *to += value; }
void prefetch_line(const T*) {}
int computed_again(int value) { return value; }
void store(T* to, T value) { *to = value; }
template <int n>
void store(T* to, const T (&v)[n]) {
  std::copy_n(v, n, to);
}
template <int n>
void stream_store(T* to, const T (&v)[n]) {
  std::copy_n(v, n, to);
}
template <int n>
void atomic_add(T* to, const T (&v)[n]) {
  for (int k = 0; k < n; ++k) atomicAdd(to + k, v[k]);
}

}  // namespace

// CPU prelude: the lane value type, a SIMD vector of channels, and the entries of edge matrices.
#pragma once
#include <omp.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <new>

#include "abi.h"
#include "weights.h"

#define EQ_FN __attribute__((always_inline)) inline
#if defined(__AVX512F__)
#define EQ_SIMD_BYTES 64
#elif defined(__AVX2__)
#define EQ_SIMD_BYTES 32
#else
#define EQ_SIMD_BYTES 16
#endif

namespace {

typedef EQ_SCALAR T;
typedef T Lane __attribute__((vector_size(EQ_SIMD_BYTES)));
typedef T UnalignedLane __attribute__((vector_size(EQ_SIMD_BYTES), aligned(sizeof(T)), may_alias));
template <int>
using LaneOf = Lane;  // segments name the width that a GPU thread would own
typedef Lane Sum;  // one partial sum per SIMD element, added up once an edge
constexpr int lanes = EQ_SIMD_BYTES / sizeof(T);

EQ_FN Lane fma(T a, Lane b, Lane c) { return a * b + c; }
EQ_FN Lane fma(Lane a, Lane b, Lane c) { return a * b + c; }
EQ_FN Sum dot(Lane a, Lane b, Sum sum) { return a * b + sum; }

// The first `count` elements of a vector in memory; the others read as zero, and are never written. Instructions are
// written out: compilers take longer to read <immintrin.h> than to compile most kernels.
#if defined(__AVX512F__)
EQ_FN uint16_t first_lanes(int count) { return uint16_t((1u << count) - 1); }
#elif defined(__AVX2__)
// As many ones as lanes, and as many zeros: a mask of n lanes begins n before the zeros.
alignas(64) constexpr int mask_bits[] = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};
EQ_FN Lane first_lanes(int count) {
  return (Lane) * (const UnalignedLane*)(mask_bits + 8 - count * int(sizeof(T) / 4));
}
#endif
EQ_FN Lane load_first(const T* from, int count) {
  Lane value = {};
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4)
    asm("vmovups %1, %0%{%2%}%{z%}" : "=v"(value) : "m"(*(const UnalignedLane*)from), "Yk"(first_lanes(count)));
  else asm("vmovupd %1, %0%{%2%}%{z%}" : "=v"(value) : "m"(*(const UnalignedLane*)from), "Yk"(first_lanes(count)));
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4)
    asm("vmaskmovps %1, %2, %0" : "=x"(value) : "m"(*(const UnalignedLane*)from), "x"(first_lanes(count)));
  else asm("vmaskmovpd %1, %2, %0" : "=x"(value) : "m"(*(const UnalignedLane*)from), "x"(first_lanes(count)));
#else
  for (int u = 0; u < count; ++u) value[u] = from[u];
#endif
  return value;
}
EQ_FN void store_first(T* to, int count, Lane value) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4)
    asm("vmovups %1, %0%{%2%}" : "+m"(*(UnalignedLane*)to) : "v"(value), "Yk"(first_lanes(count)));
  else asm("vmovupd %1, %0%{%2%}" : "+m"(*(UnalignedLane*)to) : "v"(value), "Yk"(first_lanes(count)));
#else
  for (int u = 0; u < count; ++u) to[u] = value[u];  // masked stores of AVX2 are slow on processors of AMD
#endif
}

// Channels c to c + lanes of a component; channels past the last one read as zero and are never written.
template <int mul>
EQ_FN Lane load(const T* component, int c) {
  if (mul % lanes == 0 || c + lanes <= mul) return (Lane) * (const UnalignedLane*)(component + c);
  return load_first(component + c, mul % lanes);
}
#ifdef EQ_BFLOAT16_WEIGHTS
typedef uint16_t Halves __attribute__((vector_size(EQ_SIMD_BYTES / 2), aligned(sizeof(uint16_t)), may_alias));
typedef uint32_t Words __attribute__((vector_size(EQ_SIMD_BYTES), may_alias));
template <int mul>
EQ_FN Lane load(const Bfloat16* component, int c) {
  Halves halves = {};
  if (mul % lanes == 0 || c + lanes <= mul) halves = *(const Halves*)(component + c);
  else
    for (int u = 0; u < mul % lanes; ++u) halves[u] = component[c + u].bits;
  return (Lane)(__builtin_convertvector(halves, Words) << 16);
}
#endif
template <int mul>
EQ_FN void store(T* component, int c, Lane value) {
  if (mul % lanes == 0 || c + lanes <= mul) *(UnalignedLane*)(component + c) = value;
  else store_first(component + c, mul % lanes, value);
}
// For what is added to again soon: a load waits until a masked store has reached the cache.
template <int mul>
EQ_FN void add_to(T* component, int c, Lane value) {
  if (mul % lanes == 0 || c + lanes <= mul) {
    *(UnalignedLane*)(component + c) += value;
  } else {
    for (int u = 0; u < mul % lanes; ++u) component[c + u] += value[u];
  }
}

// Bytes that fill the caches: half of the 32 MiB that cores of server processors share in groups. The machine is not
// asked, because what it says is of all groups together, or of a host that others use too.
constexpr int64_t much = 16 << 20;

// Past the caches, for rows that fill them and are not read again here; `component` is aligned.
EQ_FN void stream_store(T* component, Lane value) {
#if defined(__AVX__)
  asm volatile("vmovntps %1, %0" : "=m"(*(Lane*)component) : "v"(value));
#elif defined(__SSE__)
  asm volatile("movntps %1, %0" : "=m"(*(Lane*)component) : "x"(value));
#else
  *(Lane*)component = value;
#endif
}

// What was streamed is visible to other threads afterwards.
EQ_FN void finish_streams() {
#if defined(__SSE__)
  asm volatile("sfence" ::: "memory");
#endif
}

// Prefetches into the second-level cache are dropped where an address is not translated yet; those into the first level
// have it translated, so there is one of them a page.
EQ_FN void open_pages(const W* row, int64_t elements) {
  for (int64_t n = 0; n < elements; n += 4096 / sizeof(W)) __builtin_prefetch(row + n, 0, 3);
}

#define EQ_CHANNELS(c, mul) for (int c = 0; c < (mul); c += lanes)

// An entry with a minus is subtracted: a compiler would spend an instruction on the negation of each broadcast.
struct Negative {
  T value;
};
struct Entry {
  T value;
  EQ_FN operator T() const { return value; }
  EQ_FN Negative operator-() const { return {value}; }
};
EQ_FN Lane fma(Negative a, Lane b, Lane c) { return c - a.value * b; }
EQ_FN Lane operator*(Negative a, Lane b) { return -(a.value * b); }
EQ_FN Lane operator*(Entry a, Lane b) { return a.value * b; }

// Edge matrices are built for as many edges at once as a SIMD vector holds, so an entry of one edge and the next are
// `lanes` elements apart.
template <int first, int count>
struct Entries {
  const T* values;
  EQ_FN Entry operator[](int n) const { return {values[(first + n) * lanes]}; }
};
// The compiler is kept from reading entries once for all channels: they would fill the registers and spill, while a
// multiply-add takes a broadcast operand from memory at no cost.
template <int first, int count>
EQ_FN Entries<first, count> read_entries(const T* entries) {
  asm volatile("" : "+r"(entries));
  return {entries};
}

constexpr int64_t align(int64_t elements) { return (elements + 15) / 16 * 16; }

// Of so many pieces of work those that a thread takes at a time: several, but not so many that others have none at the end.
inline int64_t taken_at_a_time(int64_t pieces, int threads) {
  constexpr int64_t most = 8;
  const int64_t fair = pieces / (most * threads);
  return fair < 1 ? 1 : fair < most ? fair : most;
}

// Memory of a launch: a part for each thread, which touches it first. Got before threads start, because what goes wrong
// can be told from there alone: throws std::bad_alloc.
class Scratch {
 public:
  Scratch(int64_t elements, int threads) : stride_((elements * sizeof(T) + 63) / 64 * 64 + 64) {
    base_ = static_cast<char*>(aligned_alloc(64, stride_ * threads));
    if (!base_) throw std::bad_alloc();
  }
  ~Scratch() { free(base_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  T* of(int thread) const { return reinterpret_cast<T*>(base_ + stride_ * thread); }
  // In a parallel region of the launch: of the thread that asks.
  T* own() const { return of(omp_get_thread_num()); }

 private:
  int64_t stride_;
  char* base_;
};

}  // namespace

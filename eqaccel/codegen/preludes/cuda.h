// CUDA prelude: what gpu.h needs of the machine, in CUDA's words.
#pragma once
#include "abi.h"

#define EQ_FN __device__ __forceinline__
#define EQ_CONSTANT __constant__ const
#define EQ_KERNEL extern "C" __global__
#define EQ_PARAMETER __grid_constant__
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define EQ_BULK_COPY 1
#else
#define EQ_BULK_COPY 0
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define EQ_ASYNC_COPY 1
#else
#define EQ_ASYNC_COPY 0
#endif
// Plans are measured on sm_90; elsewhere one resident block fewer leaves the registers that its code may need there.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
#define EQ_RESIDENT(blocks) ((blocks) > 1 ? (blocks) - 1 : 1)
#else
#define EQ_RESIDENT(blocks) (blocks)
#endif
// Before CUDA 13.1 compilers for these make functions of code as long as that of a segment, with what it captures in
// memory. Where they inline it by themselves it takes fewer registers than if they must.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000 &&                                                                 \
    (__CUDACC_VER_MAJOR__ < 13 || (__CUDACC_VER_MAJOR__ == 13 && __CUDACC_VER_MINOR__ == 0))
#define EQ_INLINED __attribute__((always_inline))
#else
#define EQ_INLINED
#endif

namespace {

typedef EQ_SCALAR T;

EQ_FN unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

#if EQ_ASYNC_COPY
// One element from device to shared memory without passing a register; finished by wait_copies.
EQ_FN void copy_element(T* to, const T* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from), "n"(sizeof(T))
               : "memory");
}
EQ_FN void copy_16_bytes(T* to, const T* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
EQ_FN void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int pending>
EQ_FN void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}
#else
// Through registers: finished for this thread at once, and for the block at its next barrier.
EQ_FN void copy_element(T* to, const T* from) { *to = *from; }
EQ_FN void copy_16_bytes(T* to, const T* from) { *reinterpret_cast<int4*>(to) = *reinterpret_cast<const int4*>(from); }
EQ_FN void commit_copies() {}
template <int pending>
EQ_FN void wait_copies() {}
#endif

#if EQ_BULK_COPY
// Whole rows by the bulk copy engine, which reports to a barrier in shared memory.
EQ_FN void init_barrier(unsigned barrier, unsigned arrivals = 1) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
EQ_FN void arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
EQ_FN void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
EQ_FN void expect_bytes(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
EQ_FN void wait_barrier(unsigned barrier, unsigned parity) {
  asm volatile("{\n.reg .pred done;\nWAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
               "@done bra READY;\nbra WAIT;\nREADY:\n}" ::"r"(barrier),
               "r"(parity)
               : "memory");
}
// What lanes did with shared memory comes before the copies that are asked for once they have met.
EQ_FN void publish_to_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Weights are read once: they should leave the L2 cache first. Node rows are read by many edges: last. These are what
// createpolicy gives for evict_first and evict_last; as constants they take no registers.
constexpr unsigned long long read_once = 0x12F0000000000000, read_often = 0x14F0000000000000;
EQ_FN void bulk_copy(T* to, const T* from, unsigned bytes, unsigned barrier, unsigned long long policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}
#endif

// Brings what is at p, with its line of the second-level cache, into that cache.
EQ_FN void prefetch_line(const T* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// The kernel after this one, if it was launched early, may begin once all blocks of this one have said so or ended; it
// waits for the end of this one before it reads what this one writes.
EQ_FN void let_next_begin() {
#if EQ_BULK_COPY
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
EQ_FN void wait_for_previous() {
#if EQ_BULK_COPY
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// A value that the compiler takes for another one each time, so that it keeps nothing that follows from it in registers.
EQ_FN int computed_again(int value) {
  asm("" : "+r"(value));
  return value;
}

template <class V>
EQ_FN V shuffle_xor(V value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}
EQ_FN unsigned ballot(bool condition) { return __ballot_sync(0xffffffffu, condition); }

// Waits for some warps of a block, which share one of the barriers 1 to 15, or for all of them at barrier 0. A block
// takes as many barriers of its multiprocessor as its largest number says.
#define EQ_WARP_BARRIERS 1
EQ_FN void wait_for_warps(int barrier, int warps) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(32 * warps) : "memory");
}

// To device memory, which the compiler need not find out.
EQ_FN void store(T* p, T value) { __stwb(p, value); }
EQ_FN void store(float* p, const float (&v)[4]) { __stwb((float4*)p, make_float4(v[0], v[1], v[2], v[3])); }
EQ_FN void store(double* p, const double (&v)[2]) { __stwb((double2*)p, make_double2(v[0], v[1])); }

EQ_FN void stream_store(float* p, const float (&v)[1]) { __stcs(p, v[0]); }
EQ_FN void stream_store(float* p, const float (&v)[2]) { __stcs((float2*)p, make_float2(v[0], v[1])); }
EQ_FN void stream_store(float* p, const float (&v)[4]) { __stcs((float4*)p, make_float4(v[0], v[1], v[2], v[3])); }
EQ_FN void stream_store(double* p, const double (&v)[1]) { __stcs(p, v[0]); }
EQ_FN void stream_store(double* p, const double (&v)[2]) { __stcs((double2*)p, make_double2(v[0], v[1])); }

template <int n>
EQ_FN void atomic_add(double* p, const double (&v)[n]) {
#pragma unroll
  for (int u = 0; u < n; ++u) atomicAdd(p + u, v[u]);
}
template <int n>
EQ_FN void atomic_add(float* p, const float (&v)[n]) {
  if constexpr (EQ_BULK_COPY && n == 4) {
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
                 : "memory");
  } else if constexpr (EQ_BULK_COPY && n == 2) {
    asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(p), "f"(v[0]), "f"(v[1]) : "memory");
  } else {
#pragma unroll
    for (int u = 0; u < n; ++u) atomicAdd(p + u, v[u]);
  }
}

}  // namespace

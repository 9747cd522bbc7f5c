// What tensor cores and their copies are in PTX, for every GPU that has TensorFloat-32.
#pragma once
#include "cuda.h"

namespace {

// The nearest number of TensorFloat-32, which has 11 bits; of two that are as near, the larger one.
EQ_FN unsigned head_of(float x) {
  unsigned head;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(head) : "f"(x));
  return head;
}

// Sixteen bytes, or zeros where there is nothing to copy.
EQ_FN void copy_or_clear(float* to, const float* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(inside ? 16 : 0)
               : "memory");
}

// sum = a b + before, by a warp: a is 16 x 8, b is 8 x 8. With g = lane / 4 and t = lane % 4, a lane has of a rows g and
// g + 8 in column t, then both in column t + 4; of b rows t and t + 4 of column g; of the sum columns 2 t and 2 t + 1 of
// row g, then of row g + 8.
EQ_FN void multiply_add(float (&sum)[4], const unsigned (&a)[4], const unsigned* b, const float (&before)[4]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %11, %12, %13};"
      : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(before[0]), "f"(before[1]),
        "f"(before[2]), "f"(before[3]));
}

}  // namespace

// What tensor cores, their copies and approximations of functions are in PTX, for compute capability 8.0 and later.
#pragma once
#include "cuda.h"

namespace {

// The nearest halves of two numbers, the first one in the low bits; of two halves that are as near, the even one.
EQ_FN unsigned halves_of(float first, float second) {
  unsigned halves;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(second), "f"(first));
  return halves;
}

EQ_FN float2 floats_of(unsigned halves) {
  float2 floats;
  asm("{\n.reg .f16 first, second;\nmov.b32 {first, second}, %2;\ncvt.f32.f16 %0, first;\ncvt.f32.f16 %1, second;\n}"
      : "=f"(floats.x), "=f"(floats.y)
      : "r"(halves));
  return floats;
}

// What another lane of the warp has.
EQ_FN float of_lane(float x, int lane) { return __shfl_sync(0xFFFFFFFF, x, lane); }

// Sixteen bytes, or zeros where there is nothing to copy.
EQ_FN void copy_or_clear(float* to, const float* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(inside ? 16 : 0)
               : "memory");
}

// sum = a b + before, by a warp: a is 16 x 16, b is 16 x 8, both halves, two in a register. With g = lane / 4 and
// t = lane % 4, a lane has of a rows g and g + 8 in columns 2 t and 2 t + 1, then both in columns 2 t + 8 and 2 t + 9; of b
// the same rows of column g; of the sum columns 2 t and 2 t + 1 of row g, then of row g + 8.
EQ_FN void multiply_add(float (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[2], const float (&before)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %11, %12, %13};"
      : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(before[0]), "f"(before[1]),
        "f"(before[2]), "f"(before[3]));
}

// Four 8 x 8 matrices of halves out of shared memory, or their transposes. Lane n says where row n % 8 of matrix n / 8 is;
// a lane gets of row lane / 4 of each matrix columns lane % 4 * 2 and the next.
template <bool transposed>
EQ_FN void read_matrices(unsigned (&matrix)[4], const unsigned short* row) {
  if constexpr (transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
                 : "r"(shared_address(row)));
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
                 : "r"(shared_address(row)));
}

// 2^x, off by two units of the last place, and 1 / x, off by one.
EQ_FN float exp2_approx(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}
EQ_FN float reciprocal_approx(float x) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
  return inverse;
}

}  // namespace

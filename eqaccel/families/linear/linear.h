// Linear maps of irreps: the tables of a body, the same on all machines.
#pragma once
#include "direction.h"

namespace {

// A block that is written: `mul` times `components` columns from `first` on, the sum of the factors `begin` to `end`.
struct Output {
  int first, mul, components, begin, end;
};
// What is added to an output: `terms` channels that are read from column `first` on, times matrices of weights, of which
// each attribute of a row has one.
struct Factor {
  int first, terms;
  int64_t begin, stride, matrix_stride;
  T coefficient;

  // The matrix of an attribute has rows of weights, `stride` apart: of a term, or backward, where it is transposed, of a
  // column.
  EQ_FN const T* weights(const void* w, int attribute, int term, int column) const {
    const T* matrix = static_cast<const T*>(w) + begin + attribute * matrix_stride;
    return has_gradient ? matrix + column * stride + term : matrix + term * stride + column;
  }
};
// For the derivative by weights: a block of gz that is read, and the weights of a path from channels of x, read from column
// `first` on, to that block.
struct Written {
  int first, mul, components;
};
struct Matrix {
  int first, mul_in, block;
  int64_t begin;
  T coefficient;
};

}  // namespace

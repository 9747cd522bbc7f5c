// GPU prelude of gates: a thread has a scalar of a row, or a gate with its channel. There are `num_edges` threads.
#pragma once
#include "abi.h"
#include "direction.h"
#include "gpu_elementary.h"
#include "machine.h"
#include "gate.h"

namespace {

struct Place {
  int64_t row;
  int number;  // of the activation in its part
  EQ_FN int64_t of(int columns, int column, int step) const { return row * columns + column + number * step; }
  EQ_FN V read(const void* rows, int columns, int column, int step) const {
    return static_cast<const T*>(rows)[of(columns, column, step)];
  }
  EQ_FN void write(void* rows, int columns, int column, int step, V value) const {
    static_cast<T*>(rows)[of(columns, column, step)] = value;
  }
};

}  // namespace

// csrc/runtime/row_kernel.cpp launches it.
#define EQ_EXPORT_GATE(P)                                                                                              \
  EQ_KERNEL void eq_rows(const EQ_PARAMETER eq_operands o) {                                                           \
    const int64_t thread = blockIdx.x * int64_t(blockDim.x) + threadIdx.x, row = thread / P::activations;              \
    if (row >= o.num_receivers) return;                                                                                \
    const int number = int(thread - row * P::activations);                                                             \
    P::each_part([&](auto part) {                                                                                      \
      typedef decltype(part) Part;                                                                                     \
      if (number >= Part::first && number < Part::first + Part::count)                                                 \
        run_part<P, Part>(o, Place{row, number - Part::first});                                                        \
    });                                                                                                                \
  }

// The check of a CPU kernel before it is first used: compilers have faults, and a wrong kernel must not be used.
#pragma once
#include <array>
#include <cstdint>
#include <string>

#include "kernel.h"

namespace eqaccel {

// What kernels compute for their check: a sorted graph, or a batch if there are no edge attributes. The code generator
// asks for it, and computes what a right kernel gives. Senders 0 and 3 reach receiver 0, senders 1 and 3 receiver 2. Two
// edges are the same pair of nodes; edges are not in order, and one receiver and one sender have none.
namespace check_problem {

constexpr int64_t batch_rows = 19;  // more than a SIMD vector holds
constexpr int64_t num_receivers = 3, num_senders = 4, num_edges = 5;
constexpr int32_t row_ptr[] = {0, 3, 3, 5}, edge[] = {3, 0, 4, 2, 1}, sender[] = {0, 3, 3, 1, 3};
constexpr int32_t t_row_ptr[] = {0, 1, 2, 2, 5}, t_slot[] = {0, 3, 1, 2, 4};

// Sequences of numbers: operands x, y, w, gz, a, b and c take those from 0 on, each its own, and p, q, r and g those from 9
// on.
constexpr std::array<uint32_t, 2> projections{7, 8};

// A number of a sequence, by a hash of its position (lowbias32, https://github.com/skeeto/hash-prospector): between 1
// and 2 in size, in steps of 1/128, so that it is exact in every dtype.
double number(uint32_t sequence, uint32_t position);

}  // namespace check_problem

// Elements of a row of each kind of operand.
struct RowSizes {
  int64_t x, y, z, w;
  // Whether all rows of a batch, which may have attributes then, share one row of weights. Gradients of both are no
  // outputs.
  bool shared_weights;
  bool rounded_weights;  // whether the kernel reads weights in bfloat16
  // Whether it is checked on a batch whose rows share one row of weights, and have one row for their gradient.
  bool summed_weights;
};

// Runs a kernel on the problem, in both layouts, and compares projections of
// its outputs with the payload's `checksums` for that direction. Returns a line for each block that differs. Throws
// std::invalid_argument if blocks or checksums are not those of such rows.
std::string self_check(const Kernel&, Scalar, Direction, const RowSizes&, const std::string& blocks,
                       const std::string& checksums);

}  // namespace eqaccel

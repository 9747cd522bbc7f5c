// eqaccel::linear as C++ calls through torch's dispatcher, and what it is made of.
#pragma once
#include <array>

#include "operators.h"

namespace eqaccel::ops {

// The form <gz, L(x, y, w)>, where L takes features x, mixes matrices of weights w by attributes y of the row, and
// multiplies; linear in each of its four operands. Given three of them, in this order, the operator is the derivative by
// the fourth: L itself without gz. So any derivative of it is the operator again, with another operand missing.
struct LinearOperands {
  static constexpr int64_t x = 0, y = 1, w = 2, gz = 3, count = 4;
};

struct LinearProblem {
  Tensor payload;   // sources of the kernels and the paths, uint8
  int64_t key;      // names the payload in the process-wide table of programs
  int64_t missing;  // the operand that the result belongs to
  int64_t columns;  // of the result: shapes must be known where the payload can not be read
};
using LinearFactors = std::array<Tensor, LinearOperands::count - 1>;

Tensor linear(const LinearProblem&, const LinearFactors&);

// The derivative by attributes, of torch's operators; it adds up in a fixed order.
Tensor linear_by_attributes(const Program&, const Tensor& x, const Tensor& w, const Tensor& gz);

}  // namespace eqaccel::ops

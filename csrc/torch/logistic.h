// The logistic function and the derivatives of SiLU, of torch's operators: where derivatives have no kernel.
#pragma once
#include "operators.h"

namespace eqaccel::ops {

// Of y and of -y, none by a subtraction from the other.
struct Logistic {
  explicit Logistic(const Tensor& at_y) : y(at_y), of(at::sigmoid(y)), rest(at::sigmoid(-y)) {}
  Tensor silu_slope() const { return of * (1 + y * rest); }
  Tensor silu_curvature() const { return of * rest * (2 + y * (rest - of)); }

  Tensor y, of, rest;
};

}  // namespace eqaccel::ops

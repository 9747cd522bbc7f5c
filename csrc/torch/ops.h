// The operators of eqaccel as C++ calls through torch's dispatcher, so that autograd, tracing and vmap see them.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <cstdint>
#include <memory>
#include <tuple>

#include "program.h"

namespace eqaccel::ops {

using at::Tensor;
using Gradients = std::tuple<Tensor, Tensor, Tensor>;                // with respect to x, y, w
using SecondGradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;  // with respect to gz, x, y, w

// Everything about a tensor product that is not a differentiable operand.
struct Problem {
  Tensor payload;         // sources of the kernels, uint8
  int64_t key;            // names the payload in the process-wide table of programs
  Tensor graph;           // packed edge index (see packed_index.h); empty for a batch
  c10::SymInt receivers;  // rows of the output
  int64_t z_dim;          // columns of the output: shapes must be known where the payload can not be read
  bool mul_ir;            // layout of x and z inside a block: (mul, 2l+1), or (2l+1, mul)
  bool atomic;            // gradients of x by atomic addition
};

// z = F(x, y, w): linear in each operand.
Tensor tensor_product(const Problem&, const Tensor& x, const Tensor& y, const Tensor& w);
// Gradients of <gz, F(x, y, w)>.
Gradients tensor_product_backward(const Problem&, const Tensor& gz, const Tensor& x, const Tensor& y, const Tensor& w);
// Gradients of <a, gx> + <b, gy> + <c, gw>, where gx, gy, gw are what tensor_product_backward gives.
SecondGradients tensor_product_double_backward(const Problem&, const Tensor& gz, const Tensor& x, const Tensor& y,
                                               const Tensor& w, const Tensor& a, const Tensor& b, const Tensor& c);

// The program of a key, for the operator `op`. The payload is read, and copied from the GPU, only the first time a process
// sees the key.
std::shared_ptr<Program> program_of(const char* op, const Tensor& payload, int64_t key);

// torch passes on the text alone, so that has to hold the kind and the log; Python takes it apart again (library.py).
[[noreturn]] void rethrow(const CompileError&);

}  // namespace eqaccel::ops

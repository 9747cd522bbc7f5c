// eqaccel::tensor_product and its derivatives as C++ calls through torch's dispatcher.
#pragma once
#include <functional>
#include <tuple>

#include "differentiate.h"
#include "operators.h"

namespace eqaccel::ops {

// Everything about a tensor product that is not a differentiable operand.
struct TensorProductProblem {
  Tensor payload;         // sources of the kernels, uint8
  int64_t key;            // names the payload in the process-wide table of programs
  Tensor graph;           // packed edge index (see packed_index.h); empty for a batch
  c10::SymInt receivers;  // rows of the output
  int64_t z_dim;          // columns of the output: shapes must be known where the payload can not be read
  bool mul_ir;            // layout of x and z inside a block: (mul, 2l+1), or (2l+1, mul)
  bool deterministic;     // gradients of x in a fixed order, not by atomic addition

  template <class Self, class Run>
  static void each(Self& p, const Run& run) {  // for keep_values
    run("key", p.key);
    run("receivers", p.receivers);
    run("z_dim", p.z_dim);
    run("mul_ir", p.mul_ir);
    run("deterministic", p.deterministic);
  }
};

using TensorProductGradients = std::tuple<Tensor, Tensor, Tensor>;                // with respect to x, y, w
using TensorProductSecondGradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;  // with respect to gz, x, y, w
// With respect to gz, x, y, w, a, b, c.
using TensorProductThirdGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// z = F(x, y, w): linear in x and y, and in w but for paths without weights.
Tensor tensor_product(const TensorProductProblem&, const Tensor& x, const Tensor& y, const Tensor& w);
// Gradients of <gz, F(x, y, w)>.
TensorProductGradients tensor_product_backward(const TensorProductProblem&, const Tensor& gz, const Tensor& x,
                                               const Tensor& y, const Tensor& w);
// Gradients of <a, gx> + <b, gy> + <c, gw>, where gx, gy, gw are what tensor_product_backward gives.
TensorProductSecondGradients tensor_product_double_backward(const TensorProductProblem&, const Tensor& gz,
                                                            const Tensor& x, const Tensor& y, const Tensor& w,
                                                            const Tensor& a, const Tensor& b, const Tensor& c);
// Gradients of <g, ggz> + <p, gx> + <q, gy> + <r, gw>, where ggz, gx, gy, gw are what tensor_product_double_backward gives.
TensorProductThirdGradients tensor_product_triple_backward(const TensorProductProblem&, const Tensor& gz,
                                                           const Tensor& x, const Tensor& y, const Tensor& w,
                                                           const Tensor& a, const Tensor& b, const Tensor& c,
                                                           const Tensor& g, const Tensor& p, const Tensor& q,
                                                           const Tensor& r);
// The same by calls of the operators below it: what the operator does where it has no kernel.
TensorProductThirdGradients compose_third_gradients(const TensorProductProblem&, const variable_list& operands,
                                                    const variable_list& incoming);
// The program that it runs for an operand x, where it has such a kernel; or null.
std::shared_ptr<Program> third_program_of(const TensorProductProblem&, const Tensor& x);
// Gradients with respect to x and y where edges share rows of weights, in a graph whose slots are edges, for so many slots
// at a time: `take` gets the gradients of the weights of the edges from `first` on, in memory that the next ones take.
std::tuple<Tensor, Tensor> tensor_product_shared_backward(
    const TensorProductProblem&, const Tensor& gz, const Tensor& x, const Tensor& y, const Tensor& w,
    const Tensor& w_row, int64_t slots, const std::function<void(int64_t first, const Tensor& gw)>& take);

}  // namespace eqaccel::ops

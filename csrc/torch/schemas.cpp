// Schemas of torch.ops.eqaccel.
//
// payload: uint8, read only when `key` is new to the process. x: (S, x_dim); y: (E, y_dim); w: (E, w_dim), or one row
// for all edges as (w_dim,) or (1, w_dim); z: (num_receivers, z_dim). An empty graph means a batch: S = E =
// num_receivers, and row n goes with row n.
#include <torch/library.h>

#define EQ_PROBLEM_ARGUMENTS "Tensor graph, SymInt num_receivers, int z_dim, bool mul_ir, bool atomic"

TORCH_LIBRARY(eqaccel, library) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  library.def("graph(Tensor receiver, Tensor sender, SymInt num_receivers, SymInt num_senders) -> Tensor", tags);
  library.def("tensor_product(Tensor payload, int key, Tensor x, Tensor y, Tensor w, " EQ_PROBLEM_ARGUMENTS
              ") -> Tensor",
              tags);
  library.def(
      "tensor_product_backward(Tensor payload, int key, Tensor gz, Tensor x, Tensor y, Tensor w, " EQ_PROBLEM_ARGUMENTS
      ") -> (Tensor gx, Tensor gy, Tensor gw)",
      tags);
  library.def("tensor_product_double_backward(Tensor payload, int key, Tensor gz, Tensor x, Tensor y, Tensor w, "
              "Tensor a, Tensor b, Tensor c, " EQ_PROBLEM_ARGUMENTS
              ") -> (Tensor ggz, Tensor gx, Tensor gy, Tensor gw)",
              tags);
  // a: (rows, terms); b: (terms, columns); payload and key: of the kernel, see matrix_product.cpp.
  library.def("matrix_product(Tensor payload, int key, Tensor a, Tensor b) -> Tensor", tags);
  // x: (rows, num_features); w: (rows, num_weights); z: (rows, num_outputs), see polynomial.cpp.
  library.def("polynomial(Tensor payload, int key, Tensor x, Tensor w, int num_outputs) -> Tensor", tags);
  library.def("polynomial_backward(Tensor payload, int key, Tensor gz, Tensor x, Tensor w, int num_outputs) -> "
              "(Tensor gx, Tensor gw)",
              tags);
  library.def("polynomial_double_backward(Tensor payload, int key, Tensor gz, Tensor x, Tensor w, Tensor a, Tensor c, "
              "int num_outputs) -> (Tensor ggz, Tensor gx, Tensor gw)",
              tags);
  // polynomial.h; four of gz, w and three features, without the one that is missing.
  library.def("polynomial_polar_form(Tensor payload, int key, Tensor f, Tensor g, Tensor h, Tensor i, int missing, "
              "SymInt columns) -> Tensor",
              tags);
  // linear.h; three of x: (rows, x_dim), y: (rows, y_dim), w: (w_dim,) and gz: (rows, z_dim), without the one that is
  // missing, which the result, of so many columns, belongs to.
  library.def("linear(Tensor payload, int key, Tensor f, Tensor g, Tensor h, int missing, int columns) -> Tensor", tags);
  // exchange.h; x: (num_local, width), gradient: (num_nodes, width). Handle 0: no ghosts, the result is a copy.
  // "Conservative" keeps TorchScript from leaving out a call whose result is not used, on one rank of many.
  for (const char* schema : {"exchange(Tensor x, int handle, SymInt num_nodes) -> Tensor",
                             "exchange_backward(Tensor gradient, int handle, SymInt num_local) -> Tensor"})
    library.def(torch::schema(schema, c10::AliasAnalysisKind::CONSERVATIVE), tags);
}

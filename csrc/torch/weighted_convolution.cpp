// eqaccel::weighted_convolution: a convolution and the product of matrices that makes its weights of edges; and
// eqaccel::of_lengths and eqaccel::once_a_pair, by which a program says what an edge and its reverse may share. They are
// made of other operators, so whatever these can do, tracing for one, is done with them; but where a step gives the graph
// (given_graph.h) weights may be made once a pair, as eqaccel/ops/edge_pairs.py does it for programs in Python.
#include <torch/library.h>

#include "given_graph.h"
#include "shared_convolution.h"
#include "tensor_product.h"

namespace eqaccel::ops {
namespace {

Tensor of_lengths(const Tensor& values) {
  if (GivenGraph* const given = GivenGraph::current()) given->note(values);
  return values;
}

Tensor once_a_pair(const Tensor& values) {
  GivenGraph* const given = GivenGraph::current();
  return given ? given->once_a_pair(values) : values;
}

Tensor weighted_convolution(const Tensor& payload, int64_t key, const Tensor& product_payload, int64_t product_key,
                            const Tensor& x, const Tensor& y, const Tensor& hidden, const Tensor& matrix,
                            const Tensor& receiver, const Tensor& sender, int64_t z_dim, bool mul_ir,
                            bool deterministic) {
  using Signature = Tensor(const Tensor&, const Tensor&, c10::SymInt, c10::SymInt);
  static const auto graph_of = find_operator<Signature>("eqaccel::graph");
  const c10::SymInt nodes = x.sym_size(0);
  const Tensor graph = graph_of.call(receiver, sender, nodes, nodes);
  const TensorProductProblem problem{payload, key, graph, nodes, z_dim, mul_ir, deterministic};
  const Product product{product_payload, product_key};
  GivenGraph* const given = GivenGraph::current();
  const int64_t row_bytes = matrix.size(1) * static_cast<int64_t>(matrix.element_size());
  const c10::intrusive_ptr<Portions> portions =
      given ? given->portions_of(hidden.size(0), y.size(0), row_bytes) : nullptr;
  if (!portions) return tensor_product(problem, x, y, multiply(product, hidden, matrix));
  if (given->is_index(graph))
    return convolve(
        c10::make_intrusive<SharedLayer>(payload, key, product, matrix, portions, z_dim, mul_ir, deterministic), x, y,
        hidden);
  // Values were shared by the edges that are given, and this layer has as many others. Where there is room for more edges
  // than there are, gradients are wrong, and the step evaluates once more.
  return tensor_product(problem, x, y, multiply(product, hidden.index_select(0, portions->pairs().row), matrix));
}

TORCH_LIBRARY_IMPL(eqaccel, CompositeImplicitAutograd, library) {
  library.impl("of_lengths", of_lengths);
  library.impl("once_a_pair", once_a_pair);
  library.impl("weighted_convolution", weighted_convolution);
}

}  // namespace
}  // namespace eqaccel::ops

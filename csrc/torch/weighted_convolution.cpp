// eqaccel::weighted_convolution: a convolution and the product of matrices that makes its weights of edges; and
// eqaccel::of_lengths and eqaccel::once_a_pair, by which a program says what an edge and its reverse may share. They are
// made of other operators, so whatever these can do, tracing for one, is done with them; but where a step gives the graph
// (given_graph.h) weights may be made once a pair, as eqaccel/ops/edge_pairs.py does it for programs in Python.
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "edge_pairs.h"
#include "given_graph.h"
#include "tensor_product.h"

namespace eqaccel::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Between the two, gradients have a row for each edge, and weights have not. Differentiated once, and not by `matrix`.
class SharedConvolution : public torch::autograd::Function<SharedConvolution> {
 public:
  static Tensor forward(AutogradContext* context, const TensorProductProblem& p, const Product& product,
                        const EdgePairs& pairs, const Tensor& x, const Tensor& y, const Tensor& hidden,
                        const Tensor& matrix, int64_t slots) {
    using Signature = Tensor(const Tensor&, int64_t, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                             const Tensor&, int64_t, int64_t, bool, bool);
    static const auto op = find_operator<Signature>("eqaccel::tensor_product_shared");
    const Tensor weights = multiply(product, hidden, matrix);
    context->save_for_backward(
        {x, y, weights, matrix, p.payload, p.graph, product.payload, pairs.row, pairs.edges, pairs.payload});
    context->saved_data["keys"] = std::vector<int64_t>{p.key, product.key, pairs.key};
    context->saved_data["receivers"] = p.receivers.expect_int();
    context->saved_data["z_dim"] = p.z_dim;
    context->saved_data["mul_ir"] = p.mul_ir;
    context->saved_data["deterministic"] = p.deterministic;
    context->saved_data["slots"] = slots;
    return op.call(p.payload, p.key, x, y, weights, pairs.row, p.graph, p.receivers.expect_int(), p.z_dim, p.mul_ir,
                   p.deterministic);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    using Signature =
        TensorProductGradients(const Tensor&, int64_t, const Tensor&, int64_t, const Tensor&, int64_t, const Tensor&,
                               const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                               const Tensor&, int64_t, int64_t, bool, bool, int64_t);
    static const auto op = find_operator<Signature>("eqaccel::shared_convolution_backward");
    TORCH_CHECK(!at::GradMode::is_enabled(),
                "eqaccel::weighted_convolution: weights of pairs are differentiated once, not twice.");
    const variable_list v = context->get_saved_variables();
    auto& data = context->saved_data;
    const std::vector<int64_t> keys = data["keys"].toIntVector();
    const auto [gx, gy, of_hidden] =
        op.call(v[4], keys[0], v[6], keys[1], v[9], keys[2], gradients[0].contiguous(), v[0], v[1], v[2], v[3], v[7],
                v[8], v[5], data["receivers"].toInt(), data["z_dim"].toInt(), data["mul_ir"].toBool(),
                data["deterministic"].toBool(), data["slots"].toInt());
    return {Tensor(), Tensor(), Tensor(), gx, gy, of_hidden, Tensor(), Tensor()};
  }
};

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
  const GivenGraph* const given = GivenGraph::current();
  const EdgePairs* const pairs = given ? given->pairs_of(hidden.size(0), y.size(0)) : nullptr;
  if (pairs == nullptr) return tensor_product(problem, x, y, multiply(product, hidden, matrix));
  if (given->is_index(graph)) {
    const int64_t slots = given->edges_at_a_time(matrix.size(1) * matrix.element_size());
    return SharedConvolution::apply(problem, product, *pairs, x, y, hidden, matrix, slots);
  }
  // Values were shared by the edges that are given, and this layer has as many others. Where there is room for more edges
  // than there are, gradients are wrong, and the step evaluates once more.
  return tensor_product(problem, x, y, multiply(product, hidden.index_select(0, pairs->row), matrix));
}

TORCH_LIBRARY_IMPL(eqaccel, CompositeImplicitAutograd, library) {
  library.impl("of_lengths", of_lengths);
  library.impl("once_a_pair", once_a_pair);
  library.impl("weighted_convolution", weighted_convolution);
}

}  // namespace
}  // namespace eqaccel::ops

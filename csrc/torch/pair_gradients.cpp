// eqaccel::multiply_pairs, and gradients of a convolution whose edges share the rows of weights of their pairs, back to the
// operand of the product of matrices that makes these. Gradients of weights are those of each edge for itself, and the
// largest arrays that there are.
#include <torch/library.h>

#include "neighbors.h"
#include "shared_convolution.h"
#include "tensor_product.h"

namespace eqaccel::ops {
namespace {
namespace pair_gradients_file {

// The sum of the values of the edges of a pair; zeros beyond the last pair.
Tensor add(const EdgePairs& pairs, const Tensor& values) {
  if (values.is_cpu()) return sums_of_rows(values, pairs.edges);
  using Signature = Tensor(const Tensor&, int64_t, const Tensor&, const Tensor&);
  static const auto op = find_operator<Signature>("eqaccel::add_pairs");
  return op.call(pairs.payload, pairs.key, values, pairs.edges);
}

// Whether rows of some edges after the other can be added up, for a matrix with so many terms.
bool adds_portions(const EdgePairs& pairs, const Tensor& matrix) {
  return !pairs.are_alone() && !matrix.is_cpu() && matrix.size(0) % NeighborKernels::quad == 0;
}

// Adds the values of edges from `first` on to the sums of pairs, after those before them.
void add_portion(const EdgePairs& pairs, const Tensor& values, int64_t first, const Tensor& sums) {
  using Signature = void(const Tensor&, int64_t, const Tensor&, int64_t, const Tensor&, const Tensor&, const Tensor&);
  static const auto op = find_operator<Signature>("eqaccel::add_some_pairs");
  op.call(pairs.payload, pairs.key, values, first, pairs.row, pairs.edges, sums);
}

Tensor multiply_pairs(const Tensor& payload, int64_t key, const Tensor& product_payload, int64_t product_key,
                      const Tensor& values, const Tensor& matrix, const Tensor& edges) {
  const Product product{product_payload, product_key};
  // Where no kernel adds rows while it multiplies, products are smaller to add than what is multiplied.
  if (!adds_rows(product, values)) return add({{}, edges, {}, payload, key}, multiply(product, values, matrix));
  using Signature = Tensor(const Tensor&, int64_t, const Tensor&, const Tensor&, const Tensor&);
  static const auto op = find_operator<Signature>("eqaccel::matrix_product_shared");
  return op.call(product_payload, product_key, values, matrix, edges);
}

TORCH_LIBRARY_IMPL(eqaccel, CompositeExplicitAutograd, library) { library.impl("multiply_pairs", multiply_pairs); }

}  // namespace pair_gradients_file
}  // namespace

std::tuple<Tensor, Tensor, Tensor> gradients(const SharedLayer& layer, const PairRange& range, int64_t slots,
                                             const Tensor& gz, const Tensor& x, const Tensor& y, const Tensor& w) {
  const EdgePairs& pairs = range.pairs;
  const Product& product = layer.product;
  const Tensor back = layer.matrix.t();
  if (slots >= y.size(0)) {
    using Signature = TensorProductGradients(const Tensor&, int64_t, const Tensor&, const Tensor&, const Tensor&,
                                             const Tensor&, const Tensor&, const Tensor&, int64_t, int64_t, bool, bool);
    static const auto op = find_operator<Signature>("eqaccel::tensor_product_shared_backward");
    const auto [gx, gy, gw] = op.call(layer.payload, layer.key, gz, x, y, w, pairs.row, range.index, x.size(0),
                                      layer.z_dim, layer.mul_ir, layer.deterministic);
    if (pairs.are_alone()) return {gx, gy, multiply(product, gw, back)};
    return {gx, gy,
            pair_gradients_file::multiply_pairs(pairs.payload, pairs.key, product.payload, product.key, gw, back,
                                                pairs.edges)};
  }
  const TensorProductProblem problem{layer.payload, layer.key,    range.index,        x.size(0),
                                     layer.z_dim,   layer.mul_ir, layer.deterministic};
  const int64_t terms = layer.matrix.size(0);
  const bool adds = pair_gradients_file::adds_portions(pairs, layer.matrix);
  const Tensor rows = at::empty({adds ? pairs.size() : y.size(0), terms}, layer.matrix.options());
  const auto take = [&](int64_t first, const Tensor& gw) {
    if (adds) pair_gradients_file::add_portion(pairs, multiply(product, gw, back), first, rows);
    else multiply_into(product, gw, back, rows.narrow(0, first, gw.size(0)));
  };
  const auto [gx, gy] = tensor_product_shared_backward(problem, gz, x, y, w, pairs.row, slots, take);
  return {gx, gy, adds || pairs.are_alone() ? rows : pair_gradients_file::add(pairs, rows)};
}

}  // namespace eqaccel::ops

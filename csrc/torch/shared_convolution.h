// Convolutions whose edges share the rows of weights of their pairs, with the product of matrices that makes these.
#pragma once
#include <tuple>
#include <utility>

#include "portions.h"

namespace eqaccel::ops {

// A convolution and its product, over the graph of `portions`.
struct SharedLayer : torch::CustomClassHolder {
  Tensor payload;
  int64_t key;
  Product product;
  Tensor matrix;  // (terms, w_dim)
  c10::intrusive_ptr<Portions> portions;
  int64_t z_dim;
  bool mul_ir, deterministic;

  SharedLayer(Tensor payload, int64_t key, Product product, Tensor matrix, c10::intrusive_ptr<Portions> portions,
              int64_t z_dim, bool mul_ir, bool deterministic)
      : payload(std::move(payload)), key(key), product(std::move(product)), matrix(std::move(matrix)),
        portions(std::move(portions)), z_dim(z_dim), mul_ir(mul_ir), deterministic(deterministic) {}
};

// The convolution with weights that are the product of hidden (pairs, terms) and the matrix, which is differentiated once,
// and not by the matrix.
Tensor convolve(const c10::intrusive_ptr<SharedLayer>&, const Tensor& x, const Tensor& y, const Tensor& hidden);

// Gradients of x, y and hidden over the edges of a range, so many slots at a time, which have to be edges unless they are
// all. w: (pairs, w_dim).
std::tuple<Tensor, Tensor, Tensor> gradients(const SharedLayer&, const PairRange&, int64_t slots, const Tensor& gz,
                                             const Tensor& x, const Tensor& y, const Tensor& w);

}  // namespace eqaccel::ops

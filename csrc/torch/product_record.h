// The convolutions of a program, with operands and result, for who differentiates more than the program itself does.
#pragma once
#include <vector>

#include "tensor_product.h"

namespace eqaccel::ops {

struct RecordedProduct {
  TensorProductProblem problem;
  Tensor x, y, w, z;  // as autograd sees them
};

// While it lives, keeps what eqaccel::tensor_product is called with over a graph on this thread.
class ProductRecord {
 public:
  ProductRecord();
  ~ProductRecord();
  ProductRecord(const ProductRecord&) = delete;
  ProductRecord& operator=(const ProductRecord&) = delete;

  const std::vector<RecordedProduct>& products() const { return products_; }

  // What the operator calls.
  static void note(const TensorProductProblem&, const Tensor& x, const Tensor& y, const Tensor& w, const Tensor& z);

 private:
  std::vector<RecordedProduct> products_;
  ProductRecord* outer_;
};

}  // namespace eqaccel::ops

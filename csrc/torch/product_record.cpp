#include "product_record.h"

#include <utility>

namespace eqaccel::ops {
namespace {

thread_local ProductRecord* innermost = nullptr;

}  // namespace

ProductRecord::ProductRecord() : outer_(std::exchange(innermost, this)) {}

ProductRecord::~ProductRecord() { innermost = outer_; }

void ProductRecord::note(const TensorProductProblem& problem, const Tensor& x, const Tensor& y, const Tensor& w,
                         const Tensor& z) {
  if (innermost != nullptr && problem.graph.numel() > 0) innermost->products_.push_back({problem, x, y, w, z});
}

}  // namespace eqaccel::ops

// How results of eqaccel::matrix_product are made again, by those who would keep them otherwise.
#pragma once
#include <torch/custom_class.h>

#include <optional>
#include <string>
#include <utility>

#include "differentiate.h"
#include "operators.h"

namespace eqaccel::ops {

// A result that is not kept; the tensors that it is made of are, by whoever has the recipe.
class ProductRecipe : public torch::CustomClassHolder {
 public:
  using Data = decltype(AutogradContext::saved_data);

  ProductRecipe(const Tensor& result, Data data);

  // The values of the result, as if it had been kept: gradients reach the tensor that it stands for.
  Tensor make(const variable_list& operands) const;

  // The same, for the one node of autograd that has the recipe. But if nobody else can see the gradient of that tensor,
  // gradients go on to what the result is made of at once, and do not wait until they have met others of it.
  Tensor make_anew(const variable_list& operands) const;

 private:
  bool is_out_of_reach() const;

  Data data_;
  torch::autograd::Edge edge_;
};

// The recipe of a tensor that autograd knows as such a result, and the operands to keep; nothing where it is small or
// they are not there.
std::optional<std::pair<c10::intrusive_ptr<ProductRecipe>, variable_list>> product_recipe(const Tensor&);

}  // namespace eqaccel::ops

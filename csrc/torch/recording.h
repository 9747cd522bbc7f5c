// Nodes of the autograd graph. torch has a template of them, which takes a compiler seven seconds for each type. So the
// nodes of all operators are of one type, and each knows the functions of its operator.
#pragma once
#include <torch/csrc/autograd/custom_function.h>

#include <type_traits>
#include <typeinfo>
#include <utility>

namespace eqaccel::ops {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Gradients of an operator's operands, any of which may be undefined, from those of its results.
using GradientFunction = variable_list(AutogradContext*, const variable_list&);

// A node while an operator is called: made before the results are computed, and given them and what backward needs.
class Recording {
 public:
  Recording(GradientFunction*, const std::type_info& op, at::ArrayRef<at::Tensor> operands);

  AutogradContext& context() const;
  void give(at::ArrayRef<at::Tensor> results) const;
  // After the last thing that the context is to save.
  void finish() const;

 private:
  // torch 2.13 counts references to a node inside of it, earlier versions outside.
  using Node = std::remove_cvref_t<decltype(std::declval<at::Tensor>().grad_fn())>;

  Node node_;
};

// What a node keeps if `backward` computes its gradients, to be looked at before these are asked for. Otherwise null, and
// where hooks of a checkpoint or another program pack what is saved, or have done so for this node.
AutogradContext* context_of(torch::autograd::Node* node, GradientFunction* backward);

}  // namespace eqaccel::ops

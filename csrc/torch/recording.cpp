#include "recording.h"

#include <ATen/SavedTensorHooks.h>
#include <c10/util/Type.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <cstdint>
#include <memory>
#include <string>

namespace eqaccel::ops {
namespace {

constexpr const char* backward_key = "backward";

GradientFunction* backward_of(const AutogradContext& context) {
  return reinterpret_cast<GradientFunction*>(context.saved_data.at(backward_key).toInt());
}

// Compiled autograd hands over the context alone, so that the function stands there.
struct AnyOperator {
  static constexpr bool is_traceable = false;

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return backward_of(*context)(context, gradients);
  }
};

// A node that errors and profilers call by the name of its operator.
class OperatorNode final : public torch::autograd::CppNode<AnyOperator> {
 public:
  explicit OperatorNode(const std::type_info& op) : op_(op) {}
  std::string name() const override { return c10::demangle(op_.name()); }

  bool packed = false;  // whether hooks have what it saved

 private:
  const std::type_info& op_;
};

OperatorNode& operator_node(torch::autograd::Node& node) { return static_cast<OperatorNode&>(node); }

template <class Pointer>
Pointer make_node(const std::type_info& op) {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, torch::autograd::Node>)
    return c10::make_intrusive<OperatorNode>(op);
  else return Pointer(new OperatorNode(op), [](auto* node) { deleteNode(node); });
}

// Hooks on saved tensors, of a checkpoint for example, which expects to be asked for each once, in the backward pass.
bool has_hooks() { return !at::SavedTensorDefaultHooks::get_tls_state().stack.empty(); }

}  // namespace

Recording::Recording(GradientFunction* backward, const std::type_info& op, at::ArrayRef<at::Tensor> operands)
    : node_(make_node<Node>(op)) {
  OperatorNode& node = operator_node(*node_);
  node.is_variable_input_.assign(operands.size(), true);
  for (const at::Tensor& operand : operands) node.input_info_.emplace_back(operand);
  node.set_ctx_grad_fn(node_);
  node.set_next_edges(torch::autograd::collect_next_edges(operands));
  node.clear_input_metadata();
  node.ctx_.saved_data[backward_key] = reinterpret_cast<std::intptr_t>(backward);
}

AutogradContext& Recording::context() const { return operator_node(*node_).ctx_; }

void Recording::give(at::ArrayRef<at::Tensor> results) const {
  for (const at::Tensor& result : results) {
    torch::autograd::set_history(result, node_);
    operator_node(*node_).output_info_.emplace_back(result);
  }
}

void Recording::finish() const {
  OperatorNode& node = operator_node(*node_);
  node.packed = has_hooks();
  node.save_variables_to_ctx();
}

AutogradContext* context_of(torch::autograd::Node* node, GradientFunction* backward) {
  auto* const known = dynamic_cast<OperatorNode*>(node);
  const bool is_open = known != nullptr && !known->packed && !has_hooks();
  return is_open && backward_of(known->ctx_) == backward ? &known->ctx_ : nullptr;
}

}  // namespace eqaccel::ops

// A host without Python: loads the operator library and a scripted energy, and prints its derivatives.
// Usage: host <libeqaccel_ops.so> <model.pt>; the model holds its own operands x, y, w and edge_index.
#include <ATen/ops/zeros.h>
#include <dlfcn.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/jit/serialization/import.h>

#include <cstdio>

void print(const char* name, const at::Tensor& tensor) {
  const at::Tensor values = tensor.detach().to(at::kCPU, at::kDouble).contiguous().flatten();
  std::printf("%s", name);
  for (int64_t i = 0; i < values.numel(); ++i) std::printf(" %.17g", values.const_data_ptr<double>()[i]);
  std::printf("\n");
}

int main(int argc, char** argv) {
  if (argc != 3) return std::fprintf(stderr, "usage: %s <libeqaccel_ops.so> <model.pt>\n", argv[0]), 2;
  if (dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL) == nullptr) return std::fprintf(stderr, "%s\n", dlerror()), 2;
  torch::jit::Module model = torch::jit::load(argv[2]);
  std::vector<at::Tensor> inputs;
  for (const char* name : {"x", "y", "w"})
    inputs.push_back(model.attr(name).toTensor().detach().clone().requires_grad_(true));
  const auto edge_index = model.attr("edge_index").toTensor();

  const at::Tensor energy = model.forward({inputs[0], inputs[1], inputs[2], edge_index}).toTensor();
  const auto first = torch::autograd::grad({energy}, inputs, {}, /*retain_graph=*/true, /*create_graph=*/true);
  at::Tensor squares = at::zeros({}, energy.options());
  for (const auto& gradient : first) squares = squares.add(gradient.square().sum());
  const auto second = torch::autograd::grad({squares}, inputs);
  print("energy", energy);
  for (const auto& gradient : first) print("first", gradient);
  for (const auto& gradient : second) print("second", gradient);
  return 0;
}

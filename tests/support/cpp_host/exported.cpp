// A host without Python: opens an exported potential and evaluates it with ghosts that it fills itself.
// Usage: exported <libeqaccel_ops.so> <potential.pt> <operands.pt>; the operands are attributes of a module: vectors,
// edge_index, types, and owner, the local node that each ghost is an image of.
#include <dlfcn.h>
#include <eqaccel/exchange.h>
#include <torch/csrc/jit/serialization/import.h>

#include <cstdio>
#include <cstring>
#include <numeric>
#include <vector>

// Each ghost comes in a message of its own.
class Images : public eqaccel::GhostExchange {
 public:
  explicit Images(const at::Tensor& owner)
      : owner_(owner.const_data_ptr<int64_t>(), owner.const_data_ptr<int64_t>() + owner.numel()), ends_(owner_.size()) {
    std::iota(ends_.begin(), ends_.end(), 1);
  }

  void nodes(eqaccel::GhostNodes& nodes) const override {
    const auto ghosts = static_cast<int64_t>(owner_.size());
    nodes = {ghosts, ghosts, ends_.data(), owner_.data()};
  }
  void forward(const void* rows, void* ghost_rows, int64_t width, bool) override { copy(rows, ghost_rows, width); }
  void reverse(const void* ghost_rows, void* rows, int64_t width, bool) override { copy(ghost_rows, rows, width); }

 private:
  void copy(const void* from, void* to, int64_t width) const {
    std::memcpy(to, from, owner_.size() * width * sizeof(double));
  }

  std::vector<int64_t> owner_, ends_;
};

void print(const char* name, const at::Tensor& tensor) {
  const at::Tensor values = tensor.contiguous().flatten();
  std::printf("%s", name);
  for (int64_t i = 0; i < values.numel(); ++i) std::printf(" %.17g", values.const_data_ptr<double>()[i]);
  std::printf("\n");
}

int main(int argc, char** argv) {
  if (argc != 4)
    return std::fprintf(stderr, "usage: %s <libeqaccel_ops.so> <potential.pt> <operands.pt>\n", argv[0]), 2;
  if (dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL) == nullptr) return std::fprintf(stderr, "%s\n", dlerror()), 2;
  torch::jit::ExtraFilesMap extra{{"eqaccel.json", ""}};
  torch::jit::Module potential = torch::jit::load(argv[2], at::kCPU, extra);
  if (extra["eqaccel.json"].find("\"format\": 2") == std::string::npos) return std::fprintf(stderr, "no metadata\n"), 2;
  torch::jit::Module operands = torch::jit::load(argv[3]);
  const auto operand = [&](const char* name) { return operands.attr(name).toTensor(); };

  Images images(operand("owner"));
  const int64_t num_local = operand("types").numel() - operand("owner").numel();
  const auto results = potential.forward({operand("vectors"), operand("edge_index"), operand("types"), num_local,
                                          reinterpret_cast<int64_t>(static_cast<eqaccel::GhostExchange*>(&images))});
  print("energies", results.toTuple()->elements()[0].toTensor());
  print("gradient", results.toTuple()->elements()[1].toTensor());
  return 0;
}

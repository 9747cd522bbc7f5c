// Loads a model that eqaccel.export has written, and evaluates it.
#include "eqaccel/model.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/cuda.h>

#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>

#include "eqaccel/exchange.h"
#include "file.h"
#include "given_graph.h"
#include "metadata.h"
#include "main_thread_exchange.h"
#include "moments.h"
#include "step.h"

namespace eqaccel {
namespace {

// The part of a file that holds the kernels of a step; nothing calls it (integrations/export/core.py).
constexpr const char* search_module = "search";

constexpr double unlimited = std::numeric_limits<double>::infinity();
constexpr ops::Portions::Limits no_limits{unlimited, unlimited};

// The line that says what is wrong. An error of a TorchScript program traces the program first.
std::string brief(const std::exception& error) {
  const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
  std::string text = of_torch ? of_torch->what_without_backtrace() : error.what();
  const std::string label = "RuntimeError: ";
  if (const size_t found = text.rfind(label); found != std::string::npos) text.erase(0, found + label.size());
  text.erase(0, text.find_first_not_of('\n'));  // a message about an unknown operator starts with an empty line
  return text.substr(0, text.find('\n'));
}

// The file is read once for its digest and once by torch, and in between nothing of it has run.
ModelInfo describe(const ModelOptions& options) {
  const std::string content = read_exported(options.path);
  caffe2::serialize::PyTorchStreamReader archive{std::string(options.path)};
  if (!archive.hasRecord("extra/eqaccel.json"))
    throw std::runtime_error("was not exported as TorchScript: it holds no eqaccel.json");
  const auto [bytes, size] = archive.getRecord("extra/eqaccel.json");
  const Metadata metadata = read_metadata(std::string(static_cast<const char*>(bytes.get()), size));
  if (!options.allow_native_code && (metadata.is_precompiled || holds_native_code(content)))
    throw std::runtime_error("holds kernels in machine code, which were not to be used: allow native code if you trust "
                             "the file's source, or export the model without precompile");
  return metadata.info;
}

c10::Device choose_device(const ModelOptions& options) {
  const c10::DeviceIndex count = torch::cuda::device_count();
  const std::string name = options.device;
  const c10::Device device(name != "auto" ? name : count > 0 ? "cuda" : "cpu");
  if (!device.is_cuda()) return device;
  if (count == 0)
    throw std::runtime_error("is to run on a GPU, and torch sees none: install a CUDA build of torch, or use the CPU");
  const int index = device.has_index() ? device.index() : options.local_rank % count;
  if (index >= count)
    throw std::runtime_error("is to run on cuda:" + std::to_string(index) + ", and torch sees " +
                             std::to_string(count) + " GPUs");
  return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index));
}

class TorchModel final : public Model {
 public:
  TorchModel(const ModelOptions& options) : device_(c10::kCPU) {
    info_ = describe(options);
    device_ = choose_device(options);  // whichever the model was exported on: its tensors move while they are read
    info_.device = device_.str();
    at::set_num_threads(options.threads);
    module_ = torch::jit::load(options.path, device_);
    module_.eval();
    if (device_.is_cuda()) main_thread_ = std::make_unique<MainThreadExchange>();
  }

  const ModelInfo& info() const override { return info_; }

  void evaluate(const Frame& frame, GhostExchange* exchange, double* energies, double* gradients,
                double* moments) override {
    in_brief([&] { served(exchange, [&](GhostExchange* inner) { run(frame, inner, energies, gradients, moments); }); });
  }

  std::string cannot_step() const override {
    return device_.is_cpu() || module_.hasattr(search_module)
               ? ""
               : "the file holds no kernels for it, because an earlier eqaccel wrote it: export the model again";
  }

  void keep(const Candidates& candidates) override {
    in_brief([&] {
      if (!step_) step_ = std::make_unique<Step>(setup());
      step_->keep(candidates);
    });
  }

  void step(const Atoms& atoms, GhostExchange* exchange, StepResult& result) override {
    in_brief([&] {
      if (!exchange) return step_->run(atoms, nullptr, result);
      served(exchange, [&](GhostExchange* inner) { step_->run(atoms, inner, result); });
    });
  }

  std::string steps_note() const override { return step_ ? step_->note() : ""; }

 private:
  template <class Work>
  static void in_brief(const Work& work) {
    try {
      work();
    } catch (const c10::Error& error) {
      throw std::runtime_error(brief(error));
    } catch (const std::runtime_error& error) {
      throw std::runtime_error(brief(error));
    }
  }

  // Does work whose exchanges are made on this thread.
  void served(GhostExchange* exchange, const std::function<void(GhostExchange*)>& work) {
    if (!main_thread_) return work(exchange);
    GhostExchange* inner = exchange ? main_thread_.get() : nullptr;
    main_thread_->run(exchange, [&] { work(inner); });
  }

  Step::Setup setup() {
    Step::Setup setup;
    setup.potential = [this](const at::Tensor& vectors, const at::Tensor& edge_index, const at::Tensor& types,
                             int64_t num_local,
                             GhostExchange* exchange) { return call(vectors, edge_index, types, num_local, exchange); };
    setup.search = at::empty({0}, at::kByte);
    if (!device_.is_cpu()) {
      const torch::jit::Module search = module_.attr(search_module).toModule();
      setup.search = search.attr("payload").toTensor();
      setup.search_key = search.attr("key").toInt();
    }
    setup.cutoff = info_.cutoff;
    setup.dtype = dtype();
    setup.device = device_;
    return setup;
  }

  at::ScalarType dtype() const { return info_.is_double ? at::kDouble : at::kFloat; }

  std::pair<at::Tensor, at::Tensor> call(const at::Tensor& vectors, const at::Tensor& edge_index,
                                         const at::Tensor& types, int64_t num_local, GhostExchange* exchange) {
    // The optimizer would specialise the program to this number of edges, which is another one in every step.
    const torch::jit::GraphOptimizerEnabledGuard no_optimizer(false);
    const auto handle = static_cast<int64_t>(reinterpret_cast<intptr_t>(exchange));
    const auto output = module_.forward({vectors, edge_index, types, num_local, handle}).toTuple();
    return {output->elements()[0].toTensor(), output->elements()[1].toTensor()};
  }

  void run(const Frame& frame, GhostExchange* exchange, double* energies, double* gradients, double* moments) {
    const at::Tensor edge_index = at::empty({2, frame.num_edges}, at::kLong);
    auto* index = edge_index.mutable_data_ptr<int64_t>();
    std::memcpy(index, frame.senders, frame.num_edges * sizeof(int64_t));
    std::memcpy(index + frame.num_edges, frame.receivers, frame.num_edges * sizeof(int64_t));
    const at::Tensor vectors = at::from_blob(const_cast<double*>(frame.vectors), {frame.num_edges, 3}, at::kDouble);
    const at::Tensor types = at::from_blob(const_cast<int64_t*>(frame.types), {frame.num_nodes}, at::kLong);

    if (moments) {
      const torch::jit::GraphOptimizerEnabledGuard no_optimizer(false);
      if (!moments_are_right_)
        check_moments(module_, info_.cutoff, static_cast<int64_t>(info_.type_names.size()), dtype(), device_);
      moments_are_right_ = true;
      const auto handle = static_cast<int64_t>(reinterpret_cast<intptr_t>(exchange));
      const Moments found = find_moments(module_, vectors.to(device_, dtype()), edge_index.to(device_),
                                         types.to(device_), frame.num_local, handle);
      copy(found.energies, {frame.num_local}, energies);
      copy(found.gradient, {frame.num_edges, 3}, gradients);
      copy(found.moments, {frame.num_edges, 3, 3}, moments);
      return;
    }
    const at::Tensor edges = edge_index.to(device_);
    // Nothing is shared here, so that steps that ask for moments have the bits of those that do not.
    std::optional<GivenGraph> given;
    if (may_give_)
      given.emplace(edges, sorted(edges, frame.num_nodes), frame.num_nodes, /*compare=*/device_.is_cpu() || !compared_,
                    GivenGraph::FindPairs(), in_slots(frame) ? limits_on(device_).get(/*repeats=*/false) : no_limits);
    const auto [of_nodes, of_edges] =
        call(vectors.to(device_, dtype()), edges, types.to(device_), frame.num_local, exchange);
    compared_ = true;
    if (given && given->differed()) may_give_ = false;
    copy(of_nodes, {frame.num_local}, energies);
    copy(of_edges, {frame.num_edges, 3}, gradients);
  }

  // The packed index of edges, which all layers of the program take.
  static at::Tensor sorted(const at::Tensor& edge_index, int64_t num_nodes) {
    static const auto graph = c10::Dispatcher::singleton()
                                  .findSchemaOrThrow("eqaccel::graph", "")
                                  .typed<at::Tensor(const at::Tensor&, const at::Tensor&, c10::SymInt, c10::SymInt)>();
    return graph.call(edge_index[1], edge_index[0], num_nodes, num_nodes);
  }

  // Whether edges come in the order of a packed index, as kernels for some of them take them.
  static bool in_slots(const Frame& frame) {
    const auto place = [&](int64_t edge) { return std::pair(frame.receivers[edge], frame.senders[edge]); };
    for (int64_t edge = 1; edge < frame.num_edges; ++edge)
      if (place(edge) < place(edge - 1)) return false;
    return true;
  }

  static void copy(const at::Tensor& from, at::IntArrayRef shape, double* to) {
    TORCH_CHECK(from.sizes() == shape, "the model returned a tensor of shape ", from.sizes(), ", expected ", shape);
    at::from_blob(to, shape, at::kDouble).copy_(from.detach());
  }

  ModelInfo info_;
  c10::Device device_;
  torch::jit::Module module_;
  bool compared_ = false;  // whether the edges of every layer were compared with those that are sorted
  bool may_give_ = true;  // and were the same
  bool moments_are_right_ = false;  // as far as known
  std::unique_ptr<MainThreadExchange> main_thread_;
  std::unique_ptr<Step> step_;
};

}  // namespace
}  // namespace eqaccel

extern "C" eqaccel::Model* eqaccel_load_model_5(const eqaccel::ModelOptions* options) {
  const std::string subject = "model file '" + std::string(options->path) + "' ";
  try {
    return new eqaccel::TorchModel(*options);
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(subject + error.what());
  } catch (const std::exception& error) {  // torch's, of the archive or of the program in it
    const std::string reason = eqaccel::brief(error);
    const bool lacks_operator = reason.find("Unknown builtin op") != std::string::npos;
    throw std::runtime_error(subject + "does not load: " + reason +
                             (lacks_operator ? " The installed eqaccel has no such operator: update it, or export the "
                                               "model again with it"
                                             : ""));
  }
}

#include "step.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>
#include <iomanip>
#include <limits>
#include <sstream>

#include "device.h"
#include "given_graph.h"
#include "gpu_driver.h"
#include "settings.h"

namespace eqaccel {
namespace {

using at::Tensor;

// As in eqaccel/step/engine.py.
constexpr double roundings = 1024, slack = 1.04, candidate_slack = 1.25, roomy = 1.25;
constexpr int warm_ups = 3;  // kernels compile in the first

// A recording that served for less was not worth its time; the next one waits longer.
constexpr int64_t worthwhile = 50, longest_patience = 200;

constexpr int64_t count_at = 0, nearest_at = 1, differ_at = 2, energies_at = 3;  // in a vector of results

template <class Signature>
auto operator_of(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

std::optional<c10::Stream> own_stream(c10::Device device) {
  if (device.is_cpu()) return std::nullopt;
  const c10::impl::VirtualGuardImpl gpu(device.type());
  gpu.getDefaultStream(device).synchronize();  // on which the model was read
  return gpu.getStreamFromGlobalPool(device);
}

}  // namespace

ops::WeightLimits limits_on(c10::Device device) {
  const auto asked = static_cast<double>(settings::weight_bytes());
  if (device.is_cpu()) return {asked, 0};
  const GpuDriver& driver = GpuDriver::get(backend_of(device));
  return {asked, static_cast<double>(driver.device(device.index()).memory_bytes)};
}

Step::Step(Setup setup)
    : setup_(std::move(setup)), stream_(own_stream(setup_.device)), limits_(limits_on(setup_.device)),
      not_recorded_(GraphCapture::obstacle(setup_.device)) {}

Step::Memory::Memory(const CandidateTensors& found, int64_t num_local, c10::Device device)
    : local(num_local), atoms(found.atoms()), spare(device.is_cpu() ? 0 : std::max<int64_t>(8, atoms / 64)),
      candidates(CandidateTensors::room(atoms, static_cast<int64_t>(found.size() * candidate_slack), device)) {
  // All entries take eight bytes.
  const auto doubles = at::TensorOptions().dtype(at::kDouble);
  const int64_t length = 9 + 4 * atoms;
  staged = at::zeros({length}, doubles.pinned_memory(!device.is_cpu()));
  const Tensor own = at::zeros({length + spare}, doubles.device(device));
  moved = own.narrow(0, 0, length);
  cell = own.narrow(0, 0, 9).view({1, 3, 3});
  positions = own.narrow(0, 9, 3 * atoms).view({atoms, 3});
  types = own.narrow(0, 9 + 3 * atoms, nodes()).view(at::kLong);
  zero = at::zeros({1}, doubles.device(device));
  results = at::zeros({energies_at + local + 3 * atoms + 9}, doubles.pinned_memory(!device.is_cpu()));
  candidates.fill(found);
}

int64_t Step::Memory::move(const Atoms& given) {
  double* to = staged.mutable_data_ptr<double>();
  const int64_t places = 9 + 3 * atoms;
  std::copy_n(given.cell, 9, to);
  std::copy_n(given.positions, 3 * atoms, to + 9);
  const std::size_t type_bytes = atoms * sizeof(int64_t);
  const bool others = !has_types_ || std::memcmp(to + places, given.types, type_bytes) != 0;
  if (others) std::memcpy(to + places, given.types, type_bytes);
  has_types_ = true;
  const int64_t length = others ? staged.size(0) : places;
  moved.narrow(0, 0, length).copy_(staged.narrow(0, 0, length), /*non_blocking=*/true);
  return length * static_cast<int64_t>(sizeof(double));
}

void Step::keep(const Candidates& given) {
  const c10::OptionalStreamGuard on(stream_);
  const CandidateTensors found = sort_candidates(given, setup_.device);
  ++lists_;
  is_new_ = true;
  std::string reason;
  if (!memory_) reason = "the first step";
  else if (!memory_->takes(given)) reason = "another number of atoms";
  else if (memory_->candidates.size() < found.size()) reason = "more pairs in the list";
  if (reason.empty()) return memory_->candidates.fill(found);
  forget_recording();
  memory_.reset();  // before there is more
  memory_ = std::make_unique<Memory>(found, given.num_local, setup_.device);
  reason_ = reason;
  age_ = 0;
}

void Step::forget_recording() {
  if (!capture_) return;
  patience_ = replays_ < worthwhile ? std::min(2 * patience_ + 1, longest_patience) : 1;
  capture_.reset();
  recorded_ = Tensor();
  age_ = 0;
}

void Step::make_room(const std::string& reason, int64_t num_edges) {
  forget_recording();
  reason_ = reason;
  compared_ = false;
  memory_->capacity = static_cast<int64_t>(static_cast<double>(num_edges) * slack) + 64;
}

void Step::run(const Atoms& atoms, GhostExchange* exchange, StepResult& result) {
  const c10::OptionalStreamGuard on(stream_);
  sent_bytes_ += memory_->move(atoms);
  sent_atoms_ += memory_->atoms;
  if (is_new_ && on_gpu() && !exchange) {
    // Without room edges are only counted.
    const int64_t count = search(1).count.item<int32_t>(), capacity = memory_->capacity;
    if (capacity == 0) make_room(reason_, count);
    else if (count > capacity) make_room("more edges", count);
    else if (static_cast<double>(capacity) > std::max(roomy * slack * static_cast<double>(count), 1024.0))
      make_room("fewer edges", count);
  }
  is_new_ = false;
  const double* values = fetch(exchange ? run_with(exchange) : run_within_memory());
  while (!exchange && !accept(values)) values = fetch(run_within_memory());
  result.obstacle = exchange && !shared_the_same(values) ? reason_ : "";
  ++steps_;
  ++age_;
  result.nearest = values[nearest_at];
  const double *energies = values + energies_at, *forces = energies + memory_->local, *v = forces + 3 * memory_->atoms;
  result.energies.assign(energies, forces);
  result.forces.assign(forces, v);
  for (int i = 0; i < 3; ++i)
    for (int j = 0; j < 3; ++j) result.virial[3 * i + j] = (v[3 * i + j] + v[3 * j + i]) / 2;
}

Step::Edges Step::search(int64_t capacity) const {
  using Signature = std::tuple<Tensor, Tensor, Tensor, Tensor>(
      const Tensor&, int64_t, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
      const Tensor&, const Tensor&, double, int64_t, int64_t, at::ScalarType, bool);
  static const auto neighbors = operator_of<Signature>("eqaccel::neighbors");
  const CandidateTensors& c = memory_->candidates;
  auto [vectors, edge_index, graph, count] = neighbors.call(
      setup_.search, setup_.search_key, memory_->positions, memory_->cell, memory_->types, c.ptr, c.sender, c.shift,
      c.t_ptr, c.t_order, setup_.cutoff, memory_->spare, capacity, setup_.dtype, memory_->all_reversible());
  return {vectors, edge_index, graph, count};
}

Step::Edges Step::search_exactly() const {
  if (!on_gpu()) return search(0);
  Edges edges = search(1);
  const int64_t count = edges.count.item<int32_t>(), nodes = memory_->nodes();
  if (count > 0) return search(count);
  edges.vectors = edges.vectors.narrow(0, 0, 0);
  edges.edge_index = edges.edge_index.narrow(1, 0, 0);
  const auto options = edges.graph.options();
  edges.graph = at::cat({at::full({2}, nodes, options), at::zeros({2 * nodes + 2}, options)});
  return edges;
}

ops::EdgePairs Step::find_pairs(const Edges& edges) const {
  if (!on_gpu()) return ops::find_pairs(edges.vectors, edges.graph, memory_->nodes());
  using Signature =
      std::tuple<Tensor, Tensor, Tensor>(const Tensor&, int64_t, const Tensor&, const Tensor&, int64_t, int64_t, bool);
  static const auto pairs = operator_of<Signature>("eqaccel::neighbor_pairs");
  auto [row, members, differ] = pairs.call(setup_.search, setup_.search_key, edges.vectors, edges.graph, memory_->atoms,
                                           memory_->nodes(), memory_->all_reversible());
  return {row, members, differ, setup_.search, setup_.search_key, memory_->all_reversible()};
}

Tensor Step::evaluate(const Edges& edges, bool compare, GhostExchange* exchange) {
  using Signature =
      std::tuple<Tensor, Tensor>(const Tensor&, int64_t, const Tensor&, const Tensor&, const Tensor&, int64_t);
  static const auto edge_forces = operator_of<Signature>("eqaccel::edge_forces");
  const int64_t nodes = memory_->nodes(), atoms = memory_->atoms, own = exchange ? memory_->local : nodes;
  Tensor energies, gradient, differ;
  bool others_shared = false;
  {
    std::optional<GivenGraph> given;
    GivenGraph::FindPairs find;
    // Other ranks do not evaluate again.
    const ops::Portions::Limits limits = limits_.get(/*repeats=*/exchange == nullptr);
    if (may_share_weights_)
      find = [&] { return c10::make_intrusive<ops::Portions>(find_pairs(edges), edges.graph, limits); };
    if (may_share_) given.emplace(edges.edge_index, edges.graph, nodes, compare, find, limits);
    std::tie(energies, gradient) = setup_.potential(edges.vectors, edges.edge_index, memory_->types, own, exchange);
    if (given && given->differed()) may_share_ = false;
    if (given && given->values_differed()) may_share_weights_ = false;
    shares_weights_ = given && given->shares();
    if (given) differ = given->differ();
    others_shared = given && given->differed() && given->shares();
  }
  // A layer had other edges: of them, those for which there is only room have added to the gradients of pairs.
  // Other ranks do not evaluate again.
  if (others_shared && !exchange) return evaluate(edges, compare);
  if (others_shared) differ = at::ones_like(memory_->zero);
  TORCH_CHECK(energies.sizes() == at::IntArrayRef({own}), "the model returned energies of shape ", energies.sizes(),
              ", expected ", own);
  const auto [forces, virials] = edge_forces.call(setup_.search, setup_.search_key, edges.vectors,
                                                  gradient.detach().contiguous(), edges.graph, nodes);
  const Tensor lengths = at::linalg_vector_norm(edges.vectors, 2, at::IntArrayRef({1}));
  const Tensor nearest = lengths.size(0) > 0 ? lengths.amin(at::IntArrayRef({0}), /*keepdim=*/true)
                                             : at::full({1}, setup_.cutoff, lengths.options());
  return at::cat({edges.count.to(at::kDouble), nearest.to(at::kDouble), differ.defined() ? differ : memory_->zero,
                  energies.detach().narrow(0, 0, memory_->local).to(at::kDouble), forces.narrow(0, 0, atoms).flatten(),
                  virials.narrow(0, 0, atoms).sum(0).flatten()});
}

Tensor Step::run_with(GhostExchange* exchange) {
  not_recorded_ = "ranks exchange rows of ghosts";
  Tensor results = evaluate(search_exactly(), !compared_, exchange);
  compared_ = true;
  return results;
}

Tensor Step::run_within_memory() {
  while (true) {
    try {
      return run_once();
    } catch (const std::exception& error) {
      if (!may_take_less(error)) throw;
    }
    forget_recording();  // what torch has cached it gives back by itself
    limits_.halve();
    reason_ = "less memory for weights";
  }
}

bool Step::may_take_less(const std::exception& error) const {
  // A TorchScript program leaves nothing of an error but its text.
  const auto says = [&](const char* text) { return std::strstr(error.what(), text) != nullptr; };
  return limits_.may_be_halved() && (says("out of memory") || says("can't allocate memory"));  // a GPU, or a CPU
}

Tensor Step::run_once() {
  if (!capture_ && not_recorded_.empty() && age_ >= patience_) {
    try {
      record();
    } catch (
        const std::exception& error) {  // the same work without a graph: where that fails too, its error is the one
      capture_.reset();
      if (may_take_less(error)) throw;
      const std::string text = error.what();
      not_recorded_ = "recording failed: " + text.substr(0, text.find('\n'));
    }
  }
  if (capture_) {
    capture_->replay();
    ++replays_;
    return recorded_;
  }
  Tensor results = evaluate(search(memory_->capacity), !compared_);
  compared_ = true;
  return results;
}

void Step::record() {
  for (int run = 0; run < warm_ups; ++run) evaluate(search(memory_->capacity), run == 0);
  const Tensor exact = evaluate(search(std::max<int64_t>(1, search(1).count.item<int32_t>())), true);
  capture_ = std::make_unique<GraphCapture>([this] { recorded_ = evaluate(search(memory_->capacity), false); });
  capture_->replay();
  verify(recorded_, exact);
  ++recordings_[reason_];
  replays_ = 0;
}

void Step::verify(const Tensor& recorded, const Tensor& exact) const {
  const Tensor found = recorded.cpu(), right = exact.cpu();
  if (found[count_at].item<double>() > static_cast<double>(memory_->capacity) || found[differ_at].item<double>() != 0)
    return;  // this is no result yet
  const int64_t atoms = memory_->atoms;
  const double eps =
      setup_.dtype == at::kFloat ? std::numeric_limits<float>::epsilon() : std::numeric_limits<double>::epsilon();
  const double work = setup_.cutoff * right.narrow(0, energies_at + atoms, 3 * atoms).abs().sum().item<double>();
  const auto compare = [&](const char* name, int64_t begin, int64_t length, double scale) {
    const Tensor value = found.narrow(0, begin, length), expected = right.narrow(0, begin, length);
    if (!expected.isfinite().all().item<bool>()) return;
    const double error = (value - expected).abs().max().item<double>();
    const double bound = roundings * eps * (expected.abs().sum().item<double>() + scale);
    TORCH_CHECK(error <= bound, name, " differ by ", error, " where room for edges must not matter");
  };
  compare("energies", energies_at, atoms, work);
  compare("forces", energies_at + atoms, 3 * atoms, 0);
  compare("virials", energies_at + 4 * atoms, 9, work);
}

bool Step::accept(const double* values) {
  if (on_gpu() && values[count_at] > static_cast<double>(memory_->capacity)) {
    make_room("more edges", static_cast<int64_t>(values[count_at]));
    return false;
  }
  return shared_the_same(values);
}

bool Step::shared_the_same(const double* values) {
  if (values[differ_at] == 0) return true;
  forget_recording();
  reason_ = "weights that an edge and its reverse do not share";
  may_share_weights_ = false;
  return false;
}

const double* Step::fetch(const Tensor& results) {
  memory_->results.copy_(results, /*non_blocking=*/true);
  if (stream_) stream_->synchronize();
  return memory_->results.const_data_ptr<double>();
}

std::string Step::note() const {
  std::string text = std::to_string(steps_) + " steps on kept lists (" + std::to_string(lists_) + " sent)";
  if (sent_atoms_ > 0) {
    std::ostringstream sent;
    sent << ", " << std::fixed << std::setprecision(1)
         << static_cast<double>(sent_bytes_) / static_cast<double>(sent_atoms_) << " bytes an atom sent in a step";
    text += sent.str();
  }
  std::string recorded;
  for (const auto& [reason, count] : recordings_)
    recorded += (recorded.empty() ? "" : ", ") + std::to_string(count) + " for " + reason;
  if (!recorded.empty()) text += ", recorded as a CUDA graph (" + recorded + ")";
  if (shares_weights_) text += ", weights of edges made once a pair of atoms";
  if (on_gpu() && !not_recorded_.empty()) text += ", no CUDA graph: " + not_recorded_;
  return text;
}

}  // namespace eqaccel

#include "portions.h"

#include <torch/library.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "packed_index.h"

namespace eqaccel::ops {
namespace {

// What weights and gradients of weights take together where nobody has said so, in bytes, and of a small device.
constexpr double default_bytes = 3.7 * (1 << 30), default_share = 0.125;
// Of that, what weights of pairs may take; gradients have the rest. Portions of gradients cost little as long as they keep
// the device busy; weights that find no room are made twice.
constexpr double kept_share = 0.875;
// Of the memory that there is besides, what weights of the pairs of a layer may take before they come in ranges, which cost
// more than portions do. And portions that gradients come in where there is such memory, so that each has work enough.
constexpr double pair_share = 0.5;
constexpr int64_t most_portions = 16;
// Shares are not halved below this.
constexpr double least_share = 1.0 / 16;

double machine_bytes() {
  return static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
}

int64_t nodes_of(const Tensor& index, int64_t edges) {
  return (index.numel() - packed_length<int64_t>(0, 0, edges)) / 2;
}

// Of so many things in equal portions, those whose rows take no more than a limit; one at least, if there are any.
int64_t at_a_time(int64_t count, int64_t row_bytes, double limit) {
  const double portions = std::ceil(static_cast<double>(count * row_bytes) / limit);
  const auto used =
      static_cast<int64_t>(std::clamp<double>(portions, 1, std::max<double>(static_cast<double>(count), 1)));
  return (count + used - 1) / used;
}

// Some slots that follow each other, of which every edge is alone. Neither waits for the device nor forbids graph capture.
PairRange range_of_slots(const Tensor& index, int64_t nodes, int64_t edges, int64_t first, int64_t count) {
  const auto parts = index.split_with_sizes({2, nodes + 1, edges, edges, nodes + 1, edges});
  const Tensor row = at::arange(count, index.options()), local = parts[5].sub(first);
  const auto [t_slot, before] = compacted(local, local.ge(0).logical_and(local.lt(count)), count);
  const Tensor own = at::cat({parts[0], parts[1].sub(first).clamp(0, count), row, parts[3].narrow(0, first, count),
                              before.index_select(0, parts[4]), t_slot});
  note_nodes(own, nodes, nodes);
  return {first, row.add(first).to(at::kLong), {row, {}, {}, {}, 0}, own};
}

// All pairs in ranges of so many.
std::vector<PairRange> divide(const PairRange& whole, int64_t size) {
  using Signature = std::vector<Tensor>(const Tensor&, const Tensor&, const Tensor&, int64_t, int64_t, bool);
  static const auto split = find_operator<Signature>("eqaccel::pair_ranges");
  const EdgePairs& pairs = whole.pairs;
  const int64_t edges = pairs.row.size(0), nodes = nodes_of(whole.index, edges);
  std::vector<PairRange> results;
  if (pairs.are_alone()) {
    for (int64_t first = 0; first < edges; first += size)
      results.push_back(range_of_slots(whole.index, nodes, edges, first, std::min(size, edges - first)));
    return results;
  }
  const auto parts = split.call(whole.index, pairs.row, pairs.edges, nodes, size, pairs.all_reversible);
  for (std::size_t n = 0; n + 3 < parts.size(); n += 4) {
    const EdgePairs own{parts[n + 1], parts[n + 2], pairs.differ, pairs.payload, pairs.key, pairs.all_reversible};
    results.push_back({static_cast<int64_t>(n / 4) * size, parts[n], own, parts[n + 3]});
  }
  return results;
}

}  // namespace

Portions::Portions(EdgePairs pairs, Tensor index, const Limits& limits)
    : whole_{{0, {}, std::move(pairs), std::move(index)}}, limits_(limits) {}

const std::vector<PairRange>& Portions::ranges(int64_t row_bytes) {
  const int64_t size = at_a_time(pairs().size(), row_bytes, std::max(limits_.pairs, pair_share * limits_.besides));
  if (size >= pairs().size()) return whole_;
  const auto found = divided_.find(size);
  return found != divided_.end() ? found->second : divided_.emplace(size, divide(whole(), size)).first->second;
}

int64_t Portions::edges_at_a_time(int64_t row_bytes, int64_t edges, int64_t pairs) const {
  const double left = limits_.pairs - kept_bytes() - static_cast<double>(pairs * row_bytes);
  const double of_few = std::min(static_cast<double>(edges * row_bytes) / most_portions, limits_.besides);
  return at_a_time(edges, row_bytes, std::max(limits_.gradients + std::max(left, 0.0), of_few));
}

bool Portions::is_one_portion(int64_t row_bytes) const {
  const int64_t rows = pairs().size() + pairs().row.size(0);
  return static_cast<double>(rows * row_bytes) <= limits_.pairs + limits_.gradients;
}

bool Portions::is_small(int64_t row_bytes) const {
  return static_cast<double>(pairs().row.size(0) * row_bytes) <= limits_.gradients;
}

double Portions::kept_bytes() const {
  double bytes = 0;
  for (const auto& [owner, weights] : kept_) bytes += static_cast<double>(weights.nbytes());
  return bytes;
}

Tensor Portions::made(const Name& name, int64_t bytes, const Make& make) {
  while (!kept_.empty() && kept_bytes() + static_cast<double>(bytes) > limits_.pairs) kept_.pop_front();
  ++times_made_;
  return kept_.emplace_back(name, make()).second;
}

Tensor Portions::taken(const Name& name, int64_t bytes, const Make& make) {
  const auto is_it = [&](const auto& kept) { return kept.first == name; };
  if (std::none_of(kept_.begin(), kept_.end(), is_it)) made(name, bytes, make);
  const auto found = std::find_if(kept_.begin(), kept_.end(), is_it);
  Tensor weights = std::move(found->second);
  kept_.erase(found);
  return weights;
}

std::vector<Tensor> Portions::range_indices() const {
  std::vector<Tensor> indices;
  for (const auto& [size, parts] : divided_)
    for (const PairRange& part : parts) indices.push_back(part.index);
  return indices;
}

WeightLimits::WeightLimits(double asked, double memory)
    : asked_(asked), memory_(memory > 0 ? memory : machine_bytes()) {}

Portions::Limits WeightLimits::get(bool repeats) const {
  const double besides = asked_ > 0 ? 0 : memory_ * share_ / (repeats ? 1 : 2);
  const double bytes = asked_ > 0 ? asked_ : std::min(default_bytes * share_, default_share * besides);
  return {bytes * kept_share, bytes * (1 - kept_share), besides};
}

bool WeightLimits::may_be_halved() const { return !(asked_ > 0) && share_ > least_share; }

void register_portions() {
  static const auto limits = torch::class_<WeightLimits>("eqaccel", "WeightLimits")
                                 .def(torch::init<double, double>())
                                 .def("get",
                                      [](const c10::intrusive_ptr<WeightLimits>& self) {
                                        const auto [pairs, gradients, besides] = self->get();
                                        return std::tuple(pairs, gradients, besides);
                                      })
                                 .def("may_be_halved", &WeightLimits::may_be_halved)
                                 .def("halve", &WeightLimits::halve);
  static const auto portions =
      torch::class_<Portions>("eqaccel", "Portions")
          .def(torch::init([](const Tensor& row, const Tensor& edges, const Tensor& differ, const Tensor& payload,
                              int64_t key, bool all_reversible, const Tensor& index, double pairs, double gradients,
                              double besides) {
            return c10::make_intrusive<Portions>(EdgePairs{row, edges, differ, payload, key, all_reversible}, index,
                                                 Portions::Limits{pairs, gradients, besides});
          }))
          .def("is_one_portion", &Portions::is_one_portion)
          .def("kept_bytes", &Portions::kept_bytes)
          .def("times_made", &Portions::times_made)
          .def("range_indices", &Portions::range_indices);
}

}  // namespace eqaccel::ops

#include "portions.h"

#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "packed_index.h"

namespace eqaccel::ops {
namespace {

// Of the memory of a device, what weights of pairs may take, and gradients of those of edges. What finds no room takes
// longer, so that is left to systems that need it.
constexpr double pair_share = 0.5, gradient_share = 0.125, least_pair_share = pair_share / 16;
// Of memory that is asked for, what weights of pairs may take; gradients have the rest. Portions of gradients cost little as
// long as they keep the device busy; weights that find no room are made twice.
constexpr double kept_share = 0.875;

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
  const int64_t size = at_a_time(pairs().size(), row_bytes, limits_.pairs);
  if (size >= pairs().size()) return whole_;
  const auto found = divided_.find(size);
  return found != divided_.end() ? found->second : divided_.emplace(size, divide(whole(), size)).first->second;
}

int64_t Portions::edges_at_a_time(int64_t row_bytes, int64_t edges) const {
  return at_a_time(edges, row_bytes, limits_.gradients);
}

bool Portions::is_one_portion(int64_t row_bytes) {
  const int64_t edges = pairs().row.size(0);
  return ranges(row_bytes).size() == 1 && edges_at_a_time(row_bytes, edges) == edges;
}

Tensor Portions::made(const Name& name, int64_t bytes, const Make& make) {
  double taken = static_cast<double>(bytes);
  for (const auto& [owner, weights] : kept_) taken += static_cast<double>(weights.nbytes());
  for (; !kept_.empty() && taken > limits_.pairs; kept_.pop_front())
    taken -= static_cast<double>(kept_.front().second.nbytes());
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

Portions::Limits WeightLimits::get(bool repeats) const {
  if (asked_ > 0) return {asked_ * kept_share, asked_ * (1 - kept_share)};
  const double memory = memory_ * share_;
  return {memory * pair_share / (repeats ? 1 : 2), memory * gradient_share};
}

bool WeightLimits::may_be_halved() const {
  return !(asked_ > 0) && std::isfinite(memory_) && share_ * pair_share > least_pair_share;
}

void register_portions() {
  static const auto limits = torch::class_<WeightLimits>("eqaccel", "WeightLimits")
                                 .def(torch::init<double, double>())
                                 .def("get",
                                      [](const c10::intrusive_ptr<WeightLimits>& self) {
                                        const auto [pairs, gradients] = self->get();
                                        return std::tuple(pairs, gradients);
                                      })
                                 .def("may_be_halved", &WeightLimits::may_be_halved)
                                 .def("halve", &WeightLimits::halve);
  static const auto portions =
      torch::class_<Portions>("eqaccel", "Portions")
          .def(torch::init([](const Tensor& row, const Tensor& edges, const Tensor& differ, const Tensor& payload,
                              int64_t key, bool all_reversible, const Tensor& index, double pair_bytes,
                              double gradient_bytes) {
            return c10::make_intrusive<Portions>(EdgePairs{row, edges, differ, payload, key, all_reversible}, index,
                                                 Portions::Limits{pair_bytes, gradient_bytes});
          }))
          .def("is_one_portion", &Portions::is_one_portion)
          .def("times_made", &Portions::times_made)
          .def("range_indices", &Portions::range_indices);
}

}  // namespace eqaccel::ops

#include "given_graph.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <utility>

namespace eqaccel {
namespace {

thread_local GivenGraph* innermost = nullptr;

bool same(const at::Tensor& given, const at::Tensor& row) {
  if (given.scalar_type() != row.scalar_type() || given.device() != row.device()) return false;
  const bool is_it = given.const_data_ptr() == row.const_data_ptr() && given.strides() == row.strides();
  return is_it || at::equal(given, row);
}

}  // namespace

GivenGraph::GivenGraph(at::Tensor edge_index, at::Tensor packed, int64_t num_nodes, bool compare, FindPairs find_pairs,
                       const ops::Portions::Limits& limits)
    : edge_index_(std::move(edge_index)), packed_(std::move(packed)), num_nodes_(num_nodes), compare_(compare),
      find_pairs_(std::move(find_pairs)), limits_(limits), outer_(std::exchange(innermost, this)) {}

GivenGraph::~GivenGraph() { innermost = outer_; }

GivenGraph* GivenGraph::current() { return innermost; }

bool GivenGraph::are(const at::Tensor& receiver, const at::Tensor& sender) {
  if (!compare_ || (same(edge_index_[1], receiver) && same(edge_index_[0], sender))) return true;
  differed_ = true;
  return false;
}

bool GivenGraph::are_receivers(const at::Tensor& numbers, int64_t num_nodes) {
  if (num_nodes != num_nodes_ || numbers.numel() != edge_index_.size(1)) return false;
  if (!compare_ || same(edge_index_[1], numbers)) return true;
  differed_ = true;
  return false;
}

std::optional<at::Tensor> GivenGraph::index_of(const at::Tensor& receiver, const at::Tensor& sender,
                                               int64_t num_receivers, int64_t num_senders) {
  GivenGraph* const given = innermost;
  if (given == nullptr || num_receivers != given->num_nodes_ || num_senders != given->num_nodes_ ||
      receiver.numel() != given->edge_index_.size(1) || !given->are(receiver, sender))
    return std::nullopt;
  return given->packed_;
}

void GivenGraph::note(const at::Tensor& values) {
  const bool fits = values.dim() == 2 && values.size(0) == edge_index_.size(1) && values.device() == packed_.device();
  if (find_pairs_ && fits) noted_.emplace_back(values, at::Tensor());
}

at::Tensor GivenGraph::once_a_pair(const at::Tensor& values) {
  const auto found =
      std::find_if(noted_.begin(), noted_.end(), [&](const auto& known) { return known.first.is_same(values); });
  if (found == noted_.end()) return values;
  if (!found->second.defined()) found->second = shared(values);
  return found->second;
}

at::Tensor GivenGraph::shared(const at::Tensor& values) {
  if (!portions_) portions_ = find_pairs_();
  const ops::EdgePairs& pairs = portions_->pairs();
  if (pairs.edges.size(0) >= values.size(0)) return values;  // so that rows are told by their number
  const at::Tensor flag = compare_ ? at::zeros_like(pairs.differ) : pairs.differ;
  const at::Tensor rows = take_pairs(pairs, values, flag);
  if (compare_ && flag.item<double>() != 0) {
    values_differed_ = true;
    return values;
  }
  shares_ = true;
  return rows;
}

c10::intrusive_ptr<ops::Portions> GivenGraph::portions_of(int64_t rows, int64_t edges, int64_t row_bytes) {
  if (edges != edge_index_.size(1)) return nullptr;
  if (rows != edges) return shares_ && rows == portions_->pairs().size() ? portions_ : nullptr;
  if (!alone_) {
    const ops::EdgePairs each{at::arange(edges, packed_.options()), {}, {}, {}, 0};
    alone_ = c10::make_intrusive<ops::Portions>(each, packed_, limits_);
  }
  return alone_->is_small(row_bytes) ? nullptr : alone_;
}

}  // namespace eqaccel

// eqaccel::graph: the packed index (packed_index.h) of an edge list, on real tensors and as a shape.
#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

#include "given_graph.h"
#include "operators.h"
#include "packed_index.h"
#include "settings.h"

namespace eqaccel {
namespace {

using at::Tensor;

void check_edges(const Tensor& receiver, const Tensor& sender, int64_t num_receivers, int64_t num_senders) {
  for (const auto& [name, index] : {std::pair("receiver", &receiver), std::pair("sender", &sender)}) {
    TORCH_CHECK(index->scalar_type() == at::kInt || index->scalar_type() == at::kLong, "eqaccel::graph: argument '",
                name, "' must be int32 or int64, got ", index->scalar_type(), ". Convert it with .long().");
    TORCH_CHECK(index->dim() == 1, "eqaccel::graph: argument '", name, "' must have shape (num_edges,), got ",
                index->sizes(), ". Pass one row of the edge index.");
  }
  TORCH_CHECK(receiver.numel() == sender.numel(),
              "eqaccel::graph: 'receiver' and 'sender' must have one entry for "
              "each edge, got ",
              receiver.numel(), " and ", sender.numel(), ".");
  TORCH_CHECK(receiver.device() == sender.device(),
              "eqaccel::graph: 'receiver' and 'sender' must be on one device, "
              "got ",
              receiver.device(), " and ", sender.device(), ". Move one with .to(device).");
  constexpr int64_t limit = std::numeric_limits<int32_t>::max();
  for (const auto& [name, count] :
       {std::pair("edges", receiver.numel()), std::pair("receivers", num_receivers), std::pair("senders", num_senders)})
    TORCH_CHECK(count >= 0 && count < limit, "eqaccel::graph: the number of ", name, " must be at least 0 and below ",
                limit, ", got ", count, ". Split a larger system.");
}

template <class Index>
void check_range(const char* name, const char* nodes, const Tensor& index, int64_t count) {
  const Index* values = index.const_data_ptr<Index>();
  for (int64_t position = 0; position < index.numel(); ++position)
    TORCH_CHECK_INDEX(values[position] >= 0 && values[position] < count, "eqaccel::graph: argument '", name,
                      "' must hold values from 0 to ", count - 1, " (", nodes, " = ", count, "), got ",
                      values[position], " at position ", position,
                      ". Check the edge list against the number of nodes.");
}

// Stable counting sort: writes the items take(0), ..., take(E-1) to `order`, by increasing node_of(item), and the first
// position of each node to `row_ptr` (count + 1). Items are the numbers 0 to E-1, in whatever order `take` has them.
template <class Take, class NodeOf>
void counting_sort(int64_t num_edges, int64_t count, Take take, NodeOf node_of, int32_t* row_ptr, int32_t* order) {
  std::fill(row_ptr, row_ptr + count + 1, 0);
  for (int64_t i = 0; i < num_edges; ++i) ++row_ptr[node_of(static_cast<int32_t>(i)) + 1];
  for (int64_t node = 0; node < count; ++node) row_ptr[node + 1] += row_ptr[node];
  std::vector<int32_t> next(row_ptr, row_ptr + count);
  for (int64_t i = 0; i < num_edges; ++i) {
    const int32_t item = take(i);
    order[next[node_of(item)]++] = item;
  }
}

// Whether edges are in the order of slots already.
template <class Index>
bool are_sorted(const Index* receiver, const Index* sender, int64_t num_edges) {
  for (int64_t e = 1; e < num_edges; ++e)
    if (std::tie(receiver[e - 1], sender[e - 1]) > std::tie(receiver[e], sender[e])) return false;
  return true;
}

template <class Index>
void sort_edges(const Tensor& receiver, const Tensor& sender, int64_t num_receivers, int64_t num_senders,
                int32_t* packed) {
  check_range<Index>("receiver", "num_receivers", receiver, num_receivers);
  check_range<Index>("sender", "num_senders", sender, num_senders);
  const Index* r = receiver.const_data_ptr<Index>();
  const Index* s = sender.const_data_ptr<Index>();
  const int64_t num_edges = receiver.numel();
  const auto [row_ptr, edge, slot_sender, t_row_ptr, t_slot] =
      PackedParts(packed, {num_receivers, num_senders, num_edges});
  packed[0] = static_cast<int32_t>(num_receivers);
  packed[1] = static_cast<int32_t>(num_senders);
  const auto same = [](int64_t i) { return static_cast<int32_t>(i); };

  if (are_sorted(r, s, num_edges)) {
    std::iota(edge, edge + num_edges, 0);
    std::fill(row_ptr, row_ptr + num_receivers + 1, 0);
    for (int64_t e = 0; e < num_edges; ++e) ++row_ptr[r[e] + 1];
    std::partial_sum(row_ptr, row_ptr + num_receivers + 1, row_ptr);
  } else {
    std::vector<int32_t> by_sender(num_edges);
    counting_sort(num_edges, num_senders, same, [&](int32_t e) { return s[e]; }, t_row_ptr, by_sender.data());
    counting_sort(
        num_edges, num_receivers, [&](int64_t i) { return by_sender[i]; }, [&](int32_t e) { return r[e]; }, row_ptr,
        edge);
  }
  for (int64_t slot = 0; slot < num_edges; ++slot) slot_sender[slot] = static_cast<int32_t>(s[edge[slot]]);
  counting_sort(num_edges, num_senders, same, [&](int32_t slot) { return slot_sender[slot]; }, t_row_ptr, t_slot);
}

// An inference tensor could not be saved for a backward pass later, and an index serves more than one call.
class NormalTensors {
 public:
  NormalTensors() {
    if (c10::InferenceMode::is_enabled()) normal_.emplace(false);
  }

 private:
  std::optional<c10::InferenceMode> normal_;
};

Tensor graph_cpu(const Tensor& receiver, const Tensor& sender, int64_t num_receivers, int64_t num_senders) {
  check_edges(receiver, sender, num_receivers, num_senders);
  if (const auto given = GivenGraph::index_of(receiver, sender, num_receivers, num_senders)) return *given;
  const NormalTensors normal;
  // One index type from here on; int64 only if asked for, so that the usual int64 edge lists are not copied.
  const auto type = receiver.scalar_type() == sender.scalar_type() ? receiver.scalar_type() : at::kLong;
  const Tensor r = receiver.to(type).contiguous(), s = sender.to(type).contiguous();
  Tensor packed = at::empty({packed_length(num_receivers, num_senders, r.numel())}, r.options().dtype(at::kInt));
  const auto sort = type == at::kInt ? sort_edges<int32_t> : sort_edges<int64_t>;
  sort(r, s, num_receivers, num_senders, packed.mutable_data_ptr<int32_t>());
  return packed;
}

bool check_indices_on_gpu() {
  try {
    return settings::check_indices();
  } catch (const SettingsError& error) {
    ops::rethrow(error);
  }
}

// Keys in order, and which ones a stable sort takes one after another. Narrow types take fewer kernels.
std::tuple<Tensor, Tensor> sorted(const Tensor& keys) {
  return at::sort(keys, /*stable=*/std::optional<bool>(true), 0, false);
}
Tensor order_of(const Tensor& keys) { return std::get<1>(sorted(keys)); }

// Only operations that neither wait for the device nor forbid graph capture.
Tensor graph_cuda(const Tensor& receiver, const Tensor& sender, int64_t num_receivers, int64_t num_senders) {
  check_edges(receiver, sender, num_receivers, num_senders);
  if (const auto given = GivenGraph::index_of(receiver, sender, num_receivers, num_senders)) return *given;
  if (check_indices_on_gpu()) {
    check_range<int64_t>("receiver", "num_receivers", receiver.to(at::kCPU, at::kLong).contiguous(), num_receivers);
    check_range<int64_t>("sender", "num_senders", sender.to(at::kCPU, at::kLong).contiguous(), num_senders);
  }
  const NormalTensors normal;
  const c10::OptionalDeviceGuard guard(receiver.device());
  const auto options = receiver.options().dtype(at::kInt);
  const auto packed = [&](std::vector<Tensor> parts) {
    // Filled by the device: copies from the host would wait.
    for (const int64_t count : {num_senders, num_receivers}) parts.insert(parts.begin(), at::full({1}, count, options));
    const Tensor index = at::cat(parts);
    note_nodes(index, num_receivers, num_senders);
    return index;
  };
  if (receiver.numel() == 0) return packed({at::zeros({num_receivers + num_senders + 2}, options)});

  // Where the keys of each node begin, of which node n has those from n * step on.
  const auto row_ptr_of = [&](const Tensor& keys, int64_t count, int64_t step) {
    const Tensor begins = at::arange(0, (count + 1) * step, step, keys.options());
    return at::searchsorted(keys, begins, /*out_int32=*/true);
  };
  const auto type_of = [](int64_t keys) {
    const auto fits = [&](int64_t limit) { return keys <= limit; };
    return fits(std::numeric_limits<int16_t>::max())   ? at::kShort
           : fits(std::numeric_limits<int32_t>::max()) ? at::kInt
                                                       : at::kLong;
  };
  const int64_t step = std::max<int64_t>(num_senders, 1);
  const Tensor keys = at::add(sender.to(at::kLong), receiver, step);
  const auto [slots, edge] = sorted(keys.to(type_of((num_receivers + 1) * step)));
  const Tensor slot_sender = sender.to(at::kInt).index_select(0, edge);
  const auto [t_slots, t_slot] = sorted(slot_sender.to(type_of(num_senders + 1)));
  return packed({row_ptr_of(slots, num_receivers, step), edge.to(at::kInt), slot_sender,
                 row_ptr_of(t_slots, num_senders, 1), t_slot.to(at::kInt)});
}

// Neither waits for the device nor forbids graph capture.
std::tuple<Tensor, Tensor, Tensor> graph_rows(const Tensor& graph, int64_t nodes, int64_t row_begin, int64_t row_end,
                                              int64_t capacity) {
  constexpr const char* op = "eqaccel::graph_rows";
  const int64_t edges = (graph.numel() - packed_length(nodes, nodes, int64_t{0})) / 3, rows = row_end - row_begin;
  check_packed(op, graph, {nodes, nodes, edges});
  TORCH_CHECK(row_begin >= 0 && rows > 0 && row_end <= nodes, op, ": rows must be a range of the ", nodes,
              " nodes, got ", row_begin, " to ", row_end, ".");
  TORCH_CHECK(capacity > 0, op, ": argument 'capacity' must be positive, got ", capacity, ".");
  const auto parts = graph.split_with_sizes({2, nodes + 1, edges, edges, nodes + 1, edges});
  const Tensor row_ptr = parts[1].slice(0, row_begin, row_end + 1), &t_row_ptr = parts[4], &t_slot = parts[5];
  const Tensor begin = row_ptr.narrow(0, 0, 1), count = row_ptr.narrow(0, rows, 1).sub(begin);
  const auto options = graph.options();
  const Tensor number = at::arange(capacity, options), slots = number.add(begin).to(at::kLong);
  const Tensor sender = parts[3].index_select(0, slots.clamp_max(edges - 1));
  const Tensor local = t_slot.sub(begin);
  const Tensor inside = local.ge(0).logical_and(local.lt(count.clamp_max(capacity)));
  const auto [within, before] = compacted(local, inside, capacity);
  const Tensor index =
      at::cat({at::full({1}, rows, options), at::full({1}, nodes, options), row_ptr.sub(begin).clamp_max(capacity),
               number, sender, before.index_select(0, t_row_ptr), within});
  note_nodes(index, rows, nodes);
  return {index, slots, count};
}

// Edges in ranges, each with the rows that it has in some order: the first edge of each row, from the first of its range
// on. `ends` (rows) are where rows begin among `ascending`, which ascend within a range and stay below `limit`.
Tensor rows_of_ranges(const Tensor& range, const Tensor& ascending, const Tensor& begins, const Tensor& ends,
                      int64_t limit) {
  const int64_t count = begins.numel() - 1;
  const Tensor keys = range.to(at::kLong).mul(limit).add(ascending);
  const Tensor wanted = at::arange(count, keys.options()).mul(limit).unsqueeze(1).add(ends);
  const Tensor first = at::searchsorted(keys, wanted, /*out_int32=*/true).sub(begins.narrow(0, 0, count).unsqueeze(1));
  return first.clamp_min(0).minimum(begins.diff().unsqueeze(1));
}

// Where `all_reversible`, this neither waits for the device nor forbids graph capture. If not all edges have found room,
// so that pairs are not whole, nothing holds of the results but that they stay in bounds.
std::vector<Tensor> pair_ranges(const Tensor& graph, const Tensor& row, const Tensor& edges, int64_t nodes,
                                int64_t size, bool all_reversible) {
  constexpr const char* op = "eqaccel::pair_ranges";
  const int64_t all = row.numel(), pairs = edges.size(0);
  check_packed(op, graph, {nodes, nodes, all});
  TORCH_CHECK(row.scalar_type() == at::kInt && edges.scalar_type() == at::kInt && edges.dim() == 2 &&
                  edges.size(1) == 2 && row.device() == graph.device() && edges.device() == graph.device(),
              op, ": arguments 'row' and 'edges' must be the pairs of 'graph', int32 of shapes (num_edges,) and ",
              "(num_pairs, 2) on ", graph.device(), ", got ", row.sizes(), " and ", edges.sizes(), ".");
  TORCH_CHECK(size > 0, op, ": argument 'size' must be positive, got ", size, ".");
  if (all == 0 || pairs == 0) return {};
  const int64_t count = (pairs + size - 1) / size;
  const auto options = graph.options();
  const auto parts = graph.split_with_sizes({2, nodes + 1, all, all, nodes + 1, all});
  const Tensor &row_ptr = parts[1], numbers = at::arange(all, options);
  // A GPU would have to be waited for.
  TORCH_CHECK(!graph.is_cpu() || parts[2].equal(numbers), op,
              ": argument 'graph' must have edges that are in the order of slots. Sort the edges.");
  const Tensor t_slot = parts[5].clamp(0, all - 1);  // anything where edges found no room
  // The range of each slot. Those beyond the last edge have none, and come after all others.
  const Tensor range = at::where(numbers.lt(row_ptr.narrow(0, nodes, 1)), row.div(size, "floor"), count);
  const Tensor keys = range.to(count < 255 ? at::kByte : at::kInt), order = order_of(keys);
  const Tensor t_order = t_slot.index_select(0, order_of(keys.index_select(0, t_slot)));
  // Where ranges begin; with reverses of all edges they are full, but for the last one.
  const Tensor begins =
      all_reversible
          ? at::arange(count + 1, options).mul(2 * size).clamp_max(all)
          : at::constant_pad_nd(at::bincount(range, {}, count).narrow(0, 0, count), {1, 0}).cumsum(0, at::kInt);
  const Tensor place = at::empty({all}, options).scatter_(0, order, numbers);
  const Tensor local = all_reversible ? place.remainder(2 * size) : place.sub(begins.index_select(0, range));
  const Tensor sender = parts[3].index_select(0, order), t_sender = parts[3].index_select(0, t_order);
  const Tensor row_ptrs = rows_of_ranges(range.index_select(0, order), order, begins, row_ptr, all);
  const Tensor t_row_ptrs =
      rows_of_ranges(range.index_select(0, t_order), t_sender, begins, at::arange(nodes + 1, options), nodes);
  const Tensor by_sender = local.index_select(0, t_order);
  const Tensor rows = row.sub(range, size).clamp_min(0).index_select(0, order);
  const Tensor places = local.index_select(0, edges.clamp_min(0).flatten()).view_as(edges);
  const Tensor members = at::where(edges.ge(0), places, edges), head = at::full({2}, nodes, options);
  const Tensor known = all_reversible ? Tensor() : begins.cpu();
  TORCH_CHECK(all_reversible || known.const_data_ptr<int32_t>()[count] == all, op, ": expected ", all,
              " edges that nodes receive, got ", known.const_data_ptr<int32_t>()[count],
              ". Leave no room behind the last edge where not every edge has its reverse.");
  const auto begin_of = [&](int64_t number) -> int64_t {
    return all_reversible ? std::min(2 * size * number, all) : known.const_data_ptr<int32_t>()[number];
  };
  std::vector<Tensor> results;
  for (int64_t n = 0; n < count; ++n) {
    const int64_t begin = begin_of(n), own_edges = begin_of(n + 1) - begin,
                  own_pairs = std::min(size, pairs - n * size);
    const auto own = [&](const Tensor& values) { return values.narrow(0, begin, own_edges); };
    const auto below = [&](int64_t end, const Tensor& values) {
      return n + 1 < count ? values : values.clamp_max(std::max<int64_t>(end - 1, 0));  // only the last may be smaller
    };
    const Tensor index = at::cat({head, row_ptrs[n], numbers.narrow(0, 0, own_edges), own(sender), t_row_ptrs[n],
                                  below(own_edges, own(by_sender))});
    note_nodes(index, nodes, nodes);
    results.insert(results.end(), {own(order), below(own_pairs, own(rows)),
                                   below(own_edges, members.narrow(0, n * size, own_pairs)), index});
  }
  return results;
}

Tensor graph_meta(const Tensor& receiver, const Tensor&, c10::SymInt num_receivers, c10::SymInt num_senders) {
  return ops::stand_in({packed_length(num_receivers, num_senders, receiver.sym_numel())}, receiver).to(at::kInt);
}

TORCH_LIBRARY_IMPL(eqaccel, CPU, library) {
  library.impl("graph", graph_cpu);
  library.impl("graph_rows", graph_rows);
  library.impl("pair_ranges", pair_ranges);
}
TORCH_LIBRARY_IMPL(eqaccel, CUDA, library) {
  library.impl("graph", graph_cuda);
  library.impl("graph_rows", graph_rows);
  library.impl("pair_ranges", pair_ranges);
}
TORCH_LIBRARY_IMPL(eqaccel, Meta, library) { library.impl("graph", graph_meta); }

}  // namespace
}  // namespace eqaccel

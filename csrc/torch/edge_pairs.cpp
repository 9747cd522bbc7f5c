// eqaccel::edge_pairs: which edges are the reverse of each other, so that what depends on their length alone is the same.
// Nothing is taken for granted: edges pair where each receives from the node that the other receives from, and their
// vectors are opposite in every bit that counts. An edge without a partner is alone.
#include "edge_pairs.h"

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "packed_index.h"

namespace eqaccel::ops {
namespace {

constexpr const char* edge_pairs_name = "eqaccel::edge_pairs";
constexpr int32_t alone = -1;

// Slots and vectors of a graph.
template <class T>
struct Edges {
  const T* vectors;
  const PackedParts<const int32_t*> parts;
  const std::vector<int32_t> receiver;  // of each slot

  bool are_opposite(int32_t a, int32_t b) const {
    const T *v = vectors + 3 * int64_t(parts.edge[a]), *w = vectors + 3 * int64_t(parts.edge[b]);
    return v[0] == -w[0] && v[1] == -w[1] && v[2] == -w[2];
  }

  // Pairs slots in `in` with others in `out`: edges from one node to another, and those that lead back. Lists of
  // neighbours have both in the order of shifts, whose signs differ, so that partners come at the same place from the
  // other end, and the search is over at once.
  void match(const int32_t* in, const int32_t* out, int64_t ins, int64_t outs, int32_t* partner) const {
    for (int64_t k = 0; k < ins; ++k) {
      const int32_t slot = in[k];
      for (int64_t n = 0; n < outs && partner[slot] == alone; ++n) {
        const int32_t other = out[(2 * outs - 1 - k % outs - n) % outs];
        if (other == slot || partner[other] != alone || !are_opposite(slot, other)) continue;
        partner[slot] = other;
        partner[other] = slot;
      }
    }
  }

  // The pairs of a node with itself and with those behind it, which no other node looks at.
  void pair(int32_t node, std::vector<int32_t>& in, int32_t* partner) const {
    const int32_t *out = parts.t_slot + parts.t_row_ptr[node], *out_end = parts.t_slot + parts.t_row_ptr[node + 1];
    for (int32_t slot = parts.row_ptr[node], end = parts.row_ptr[node + 1]; slot < end;) {
      const int32_t other = parts.sender[slot];
      in.clear();
      for (; slot < end && parts.sender[slot] == other; ++slot) in.push_back(slot);
      if (other < node) continue;
      while (out < out_end && receiver[*out] < other) ++out;
      const int32_t* last = out;
      while (last < out_end && receiver[*last] == other) ++last;
      match(in.data(), out, in.size(), last - out, partner);
      out = last;
    }
  }
};

std::vector<int32_t> receivers_of(const int32_t* row_ptr, int64_t nodes, int64_t edges) {
  std::vector<int32_t> receiver(edges);
  for (int64_t node = 0; node < nodes; ++node)
    std::fill(receiver.begin() + row_ptr[node], receiver.begin() + row_ptr[node + 1], static_cast<int32_t>(node));
  return receiver;
}

std::tuple<Tensor, Tensor> edge_pairs(const Tensor& vectors, const Tensor& graph, int64_t num_nodes) {
  TORCH_CHECK((vectors.scalar_type() == at::kFloat || vectors.scalar_type() == at::kDouble) && vectors.dim() == 2 &&
                  vectors.size(1) == 3,
              edge_pairs_name, ": argument 'vectors' must be float32 or float64 of shape (num_edges, 3), got ",
              vectors.scalar_type(), " of shape ", vectors.sizes(), ". Pass the vectors from sender to receiver.");
  TORCH_CHECK(graph.is_cpu(), edge_pairs_name, ": argument 'graph' must be on the CPU, like 'vectors', got ",
              graph.device(), ". Move it with .cpu().");
  const Tensor held = vectors.contiguous(), packed = graph.contiguous();
  const int64_t count = vectors.size(0);
  const GraphSize size{num_nodes, num_nodes, count};
  check_packed(edge_pairs_name, packed, size);
  const PackedParts<const int32_t*> parts(packed.const_data_ptr<int32_t>(), size);
  std::vector<int32_t> partner(count, alone);
  AT_DISPATCH_FLOATING_TYPES(vectors.scalar_type(), "edge_pairs", [&] {
    const Edges<scalar_t> edges{held.const_data_ptr<scalar_t>(), parts, receivers_of(parts.row_ptr, num_nodes, count)};
    at::parallel_for(0, num_nodes, 64, [&](int64_t begin, int64_t end) {
      std::vector<int32_t> in;
      for (int64_t node = begin; node < end; ++node) edges.pair(static_cast<int32_t>(node), in, partner.data());
    });
  });
  const Tensor row = at::empty({count}, graph.options()), room = at::empty({count, 2}, graph.options());
  int32_t *rows = row.mutable_data_ptr<int32_t>(), *members = room.mutable_data_ptr<int32_t>(), pairs = 0;
  for (int32_t slot = 0; slot < count; ++slot) {
    const int32_t other = partner[slot], edge = parts.edge[slot];
    if (other != alone && other < slot) {
      rows[edge] = rows[parts.edge[other]];
      continue;
    }
    members[2 * int64_t(pairs)] = edge;
    members[2 * int64_t(pairs) + 1] = other == alone ? alone : parts.edge[other];
    rows[edge] = pairs++;
  }
  return {row, room.narrow(0, 0, pairs)};
}

TORCH_LIBRARY_IMPL(eqaccel, CPU, library) { library.impl("edge_pairs", edge_pairs); }

}  // namespace

EdgePairs find_pairs(const Tensor& vectors, const Tensor& graph, int64_t num_nodes) {
  auto [row, edges] = edge_pairs(vectors, graph, num_nodes);
  return {row, edges, at::zeros({1}, at::kDouble), row, /*key=*/0};
}

}  // namespace eqaccel::ops

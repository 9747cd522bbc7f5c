// The int32 tensor that eqaccel::graph gives: an edge list, sorted once for both directions of a convolution.
//
// A slot is a position in the order (receiver, sender, edge id), which is fixed by the edges alone: sums over slots do
// not depend on threads or devices. The tensor packs, one after the other,
//   num_receivers R, num_senders S   the nodes that it was built for; with its length they give the number of edges E
//   row_ptr (R + 1)                  first slot of each receiver
//   edge (E)                         edge held by a slot
//   sender (E)                       sender of that edge
//   t_row_ptr (S + 1)                first entry of t_slot of each sender
//   t_slot (E)                       slots ordered by (sender, slot)
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>

namespace eqaccel {

struct GraphSize {
  int64_t receivers, senders, edges;
};

template <class Int>
Int packed_length(const Int& receivers, const Int& senders, const Int& edges) {
  return edges * 3 + receivers + senders + 4;
}

template <class Pointer>
struct PackedParts {
  PackedParts(Pointer packed, const GraphSize& size)
      : row_ptr(packed + 2), edge(row_ptr + size.receivers + 1), sender(edge + size.edges),
        t_row_ptr(sender + size.edges), t_slot(t_row_ptr + size.senders + 1) {}

  Pointer row_ptr, edge, sender, t_row_ptr, t_slot;
};

// Those of some int32 values for which a condition holds, at the front of `room` places, and zeros behind them; and how many
// come before each value, and in all. Neither waits for the device nor forbids graph capture.
struct Compacted {
  at::Tensor values, before;
};
Compacted compacted(const at::Tensor& values, const at::Tensor& chosen, int64_t room);

// Notes with a packed index on a GPU, on the host, what its first two values are, so that no call has to wait for them.
// Copies, views and what comes from a file are without a note until they are first used.
void note_nodes(const at::Tensor& packed, int64_t receivers, int64_t senders);

// Throws an error of the operator `op` unless `packed` is contiguous memory of a graph of this size.
void check_packed(const char* op, const at::Tensor& packed, const GraphSize&);

}  // namespace eqaccel

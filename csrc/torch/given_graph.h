// Edges that are sorted already, for the layers of a program that sorts edges by itself.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace eqaccel {

// While it lives, eqaccel::graph gives the packed index of these edges to whoever asks for theirs on this thread. That
// holds while a GPU records, where nothing can be compared: there edges are told by their numbers alone, and those of
// nodes. So run what is to be recorded with a comparison before.
class GivenGraph {
 public:
  // edge_index: (2, num_edges) int64, senders and receivers, in the order of slots; packed: their index (packed_index.h),
  // for nodes that all send and receive. Whether to compare, which waits for a GPU.
  GivenGraph(at::Tensor edge_index, at::Tensor packed, int64_t num_nodes, bool compare);
  ~GivenGraph();
  GivenGraph(const GivenGraph&) = delete;
  GivenGraph& operator=(const GivenGraph&) = delete;

  // Whether a layer with as many edges and nodes turned out to have others.
  bool differed() const { return differed_; }

  // The index for edges between so many nodes, if it is given to this thread.
  static std::optional<at::Tensor> index_of(const at::Tensor& receiver, const at::Tensor& sender, int64_t num_receivers,
                                            int64_t num_senders);

 private:
  bool are(const at::Tensor& receiver, const at::Tensor& sender);

  at::Tensor edge_index_, packed_;
  int64_t num_nodes_;
  bool compare_, differed_ = false;
  GivenGraph* outer_;
};

}  // namespace eqaccel

// Edges that are sorted already, for the layers of a program that sorts edges by itself; and rows of values that an edge
// and its reverse share there.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "portions.h"

namespace eqaccel {

// While it lives, eqaccel::graph gives the packed index of these edges to whoever asks for theirs on this thread. That
// holds while a GPU records, where nothing can be compared: there edges are told by their numbers alone, and those of
// nodes. So run what is to be recorded with a comparison before.
//
// Values of edges that depend on an edge by its length alone are handed out once for an edge and its reverse, if pairs
// can be found. Where there is a comparison it is looked at once whether both have the same values; else the device
// compares, and says so in a flag.
class GivenGraph {
 public:
  // Finds the edges and their reverses; called once, when values are first to be shared.
  using FindPairs = std::function<c10::intrusive_ptr<ops::Portions>()>;

  // edge_index: (2, num_edges) int64, senders and receivers, in the order of slots; packed: their index (packed_index.h),
  // for nodes that all send and receive. Whether to compare, which waits for a GPU. No function if nothing is shared. And
  // what weights may take of layers that do not share them.
  GivenGraph(at::Tensor edge_index, at::Tensor packed, int64_t num_nodes, bool compare, FindPairs find_pairs,
             const ops::Portions::Limits& limits);
  ~GivenGraph();
  GivenGraph(const GivenGraph&) = delete;
  GivenGraph& operator=(const GivenGraph&) = delete;

  // Whether a layer with as many edges and nodes turned out to have others.
  bool differed() const { return differed_; }
  // Whether values were seen not to be the same for an edge and its reverse; they were not shared.
  bool values_differed() const { return values_differed_; }
  // Whether rows were handed out.
  bool shares() const { return shares_; }
  // (1,) float64 on the device: not zero if rows were handed out that should not have been; undefined if none could be.
  at::Tensor differ() const { return portions_ ? portions_->pairs().differ : at::Tensor(); }

  // The graph that is given to this thread, if any.
  static GivenGraph* current();
  // The index for edges between so many nodes, if it is given to this thread.
  static std::optional<at::Tensor> index_of(const at::Tensor& receiver, const at::Tensor& sender, int64_t num_receivers,
                                            int64_t num_senders);
  // Whether these are the receivers of the edges, of so many nodes; and where the edges of each begin.
  bool are_receivers(const at::Tensor& numbers, int64_t num_nodes);
  at::Tensor starts() const { return packed_.slice(0, 2, num_nodes_ + 3); }

  // What eqaccel::of_lengths and eqaccel::once_a_pair do.
  void note(const at::Tensor& values);
  at::Tensor once_a_pair(const at::Tensor& values);
  // For a layer over so many edges with rows of weights of so many bytes: the pairs, if rows of these number so many; or
  // the edges by themselves, if they have a row each and not all of them may be there.
  c10::intrusive_ptr<ops::Portions> portions_of(int64_t rows, int64_t edges, int64_t row_bytes);
  bool is_index(const at::Tensor& index) const { return index.is_same(packed_); }

 private:
  bool are(const at::Tensor& receiver, const at::Tensor& sender);
  at::Tensor shared(const at::Tensor& values);

  at::Tensor edge_index_, packed_;
  int64_t num_nodes_;
  bool compare_, differed_ = false, values_differed_ = false, shares_ = false;
  FindPairs find_pairs_;
  ops::Portions::Limits limits_;
  c10::intrusive_ptr<ops::Portions> portions_, alone_;
  // Values that were noted, and once they were asked for their rows, or the values themselves. They are held, so that no
  // others can come to lie at the same address.
  std::vector<std::pair<at::Tensor, at::Tensor>> noted_;
  GivenGraph* outer_;
};

}  // namespace eqaccel

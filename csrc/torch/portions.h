// How much of the layers over a graph there is at a time, so that weights that edges share fit into memory. The rules are
// here alone: programs in Python and exported ones ask for them.
#pragma once
#include <torch/custom_class.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "edge_pairs.h"

namespace eqaccel::ops {

// Some pairs that follow each other, and their edges, all numbered from the first.
struct PairRange {
  int64_t first;  // number of the first pair among all
  Tensor slots;  // (num_edges) int64, where the edges are among all; undefined if they are all
  EdgePairs pairs;
  Tensor index;  // packed, of these edges; all nodes send and receive

  // The rows that these pairs have of those of all; they share memory.
  Tensor of_pairs(const Tensor& values) const { return values.narrow(0, first, pairs.size()); }
};

// A layer asks by the bytes that weights of a pair or gradients of the weights of an edge take. Calls come one at a time,
// from whichever thread.
class Portions : public torch::CustomClassHolder {
 public:
  // What weights of pairs may take, those of all layers together, and gradients of the weights of edges at a time, in bytes;
  // what weights leave of theirs these may have too. And memory that there is besides, or 0: before a layer's own come in
  // many pieces, they take a share of that.
  struct Limits {
    double pairs, gradients, besides = 0;
  };

  // index: packed, of the edges of the pairs, between nodes that all send and receive.
  Portions(EdgePairs pairs, Tensor index, const Limits& limits);

  const PairRange& whole() const { return whole_[0]; }
  const EdgePairs& pairs() const { return whole().pairs; }

  // The pairs in ranges for which weights take what they may take, of which the first is a largest; one range, without
  // slots, if all of them may be there.
  const std::vector<PairRange>& ranges(int64_t row_bytes);
  // Of so many edges, those of which gradients of weights may be there at a time, in equal portions, beside the weights of
  // so many pairs and those that are kept.
  int64_t edges_at_a_time(int64_t row_bytes, int64_t edges, int64_t pairs) const;
  // Whether all weights of a layer may be there with all gradients, if nothing of others is.
  bool is_one_portion(int64_t row_bytes) const;
  // Whether all gradients of a layer may be there whatever else is. Then it may keep its weights by itself.
  bool is_small(int64_t row_bytes) const;

  // A layer, and the first pair of a range of it.
  using Name = std::pair<int64_t, int64_t>;
  using Make = std::function<Tensor()>;
  int64_t new_layer() { return layers_++; }
  // Makes weights of so many bytes, and keeps them while there is room: the oldest go before.
  Tensor made(const Name&, int64_t bytes, const Make&);
  // Weights for the last time: those that were kept, or else made anew.
  Tensor taken(const Name&, int64_t bytes, const Make&);
  // What the weights take that are kept now.
  double kept_bytes() const;
  // How often weights were made.
  int64_t times_made() const { return times_made_; }

  // The packed indices of all ranges that there are.
  std::vector<Tensor> range_indices() const;

 private:
  const std::vector<PairRange> whole_;
  const Limits limits_;
  std::map<int64_t, std::vector<PairRange>> divided_;  // by the pairs that one has at most
  std::deque<std::pair<Name, Tensor>> kept_;  // the oldest first
  int64_t layers_ = 0, times_made_ = 0;
};

// What weights may take of the memory of a device: what was asked for, or else some GiB, which cost little time, or a share
// of a small device. Shares may be halved a few times if the device runs out of memory.
class WeightLimits : public torch::CustomClassHolder {
 public:
  // asked: bytes that weights may take with their gradients, 0 where nobody has said so; memory: of the device, 0 for that
  // of the machine.
  WeightLimits(double asked, double memory);

  // `repeats`: whether what runs out of memory is computed again with less. Shares are half as much if not.
  Portions::Limits get(bool repeats = true) const;
  bool may_be_halved() const;
  void halve() { share_ /= 2; }

 private:
  double asked_, memory_, share_ = 1;
};

// Tells torch of the classes, in Python torch.classes.eqaccel.Portions and WeightLimits, unless that was done: before
// anything that takes one is registered.
void register_portions();

}  // namespace eqaccel::ops

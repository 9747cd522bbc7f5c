// Pairs of atoms on a device, in the order that eqaccel::neighbors takes them in.
#pragma once
#include <ATen/core/Tensor.h>

#include "eqaccel/model.h"

namespace eqaccel {

// As in eqaccel/ops/neighbors.py, but that ghosts receive nothing.
struct CandidateTensors {
  at::Tensor ptr, sender, shift, t_ptr, t_order;

  int64_t size() const { return sender.size(0); }
  int64_t atoms() const { return ptr.size(0) - 1; }
  // With room for so many pairs of so many atoms.
  static CandidateTensors room(int64_t atoms, int64_t pairs, c10::Device);
  // Puts other pairs of as many atoms in, no more than there is room for.
  void fill(const CandidateTensors&);
};

// Sorts pairs on the device, each once, and adds those between local atoms that are the other way round. Throws
// std::runtime_error if there are too many of them, or if they cross too many cells.
CandidateTensors sort_candidates(const Candidates&, c10::Device);

}  // namespace eqaccel

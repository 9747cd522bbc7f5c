// Where the energy goes that a moving atom hands on: what a heat flux is made of.
//
// The potential part of the heat flux is sum_i W_i v_i, with W_i = sum_m (r_m - r_i) dU_m/dr_i over all atoms m that
// feel atom i, over as many cutoffs as the model has layers and in whatever image (Fan et al. 2015, Langer et al. 2023).
// In terms of the edges d = r_receiver - r_sender that the model takes, an edge needs the gradient g = sum_m dU_m/dd and
// the moment M = sum_m (r_m - r_receiver) dU_m/dd, from which W of the receiver gets M, and W of the sender -(M + d g).
//
// No atom has to be unfolded for M. Let A be the moment of what a node hands on, sum_m (r_m - r_node) dU_m/dx: a step
// of backpropagation that stays at a node takes A to A, and one from the receiver of an edge to its sender adds d times
// what the plain gradient has there. Convolutions are the only places where a model has such edges, and they are linear
// in the attributes y of an edge. So M is one more backward pass for each direction k, which starts from no more than
// what every convolution gives its senders for the attributes y d_k. Ranks exchange the same ghosts as in a gradient,
// because a moment is about the node itself, wherever its image is.
#pragma once
#include <ATen/core/Tensor.h>
#include <torch/csrc/jit/api/module.h>

#include <cstdint>

namespace eqaccel {

struct Moments {
  at::Tensor energies;  // (num_local) eV, float64
  at::Tensor gradient;  // (num_edges, 3) of their sum, eV/angstrom
  at::Tensor moments;  // (num_edges, 3, 3): M, eV; directions of r_m - r_receiver, then those of d
};

// The arguments are those of Potential.forward, which gives the same energies and gradient. Ghosts go forward once and
// come back Model::moment_passes times.
Moments find_moments(const torch::jit::Module&, const at::Tensor& vectors, const at::Tensor& edge_index,
                     const at::Tensor& types, int64_t num_local, int64_t exchange);

// Throws unless moments are right for this model, which they are if atoms learn of each other by convolutions alone:
// compares them with the plain gradient of sum_m r_m U_m, on a few atoms in a row that are nobody's images.
void check_moments(const torch::jit::Module&, double cutoff, int64_t num_types, at::ScalarType, c10::Device);

}  // namespace eqaccel

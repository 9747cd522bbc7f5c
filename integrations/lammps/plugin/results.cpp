// SPDX-License-Identifier: GPL-2.0-only
// What a step has found, looked at and added to what LAMMPS keeps.
#include "pair_eqaccel.h"

#include "atom.h"
#include "update.h"

#include <cmath>

using namespace LAMMPS_NS;

std::string PairEqaccel::check_results() const
{
  const auto message = [this](int64_t node, const char *what) {
    return fmt::format("pair_style eqaccel: the model gives {} no finite {} at step {}", name(nodes.atoms()[node]),
                       what, update->ntimestep);
  };
  for (size_t n = 0; n < energies.size(); ++n)
    if (!std::isfinite(energies[n])) return message(static_cast<int64_t>(n), "energy");
  for (size_t g = 0; g < gradients.size(); ++g)
    if (!std::isfinite(gradients[g])) return message(edges.receivers[g / 3], "force");
  for (size_t m = 0; m < moments.size(); ++m)
    if (!std::isfinite(moments[m])) return message(edges.receivers[m / 9], "virial");
  return "";
}

void PairEqaccel::add_results()
{
  double **f = atom->f;
  const std::vector<int> &atoms = nodes.atoms();
  for (size_t n = 0; n < energies.size(); ++n) {
    if (eflag_global) eng_vdwl += energy_unit * energies[n];
    if (eflag_atom) eatom[atoms[n]] += energy_unit * energies[n];
  }
  for (size_t edge = 0; edge < edges.count(); ++edge) {
    const int i = atoms[edges.receivers[edge]], j = edges.sending_atoms[edge];
    const double *d = &edges.vectors[3 * edge];
    const double push[3] = {-energy_unit * gradients[3 * edge], -energy_unit * gradients[3 * edge + 1],
                            -energy_unit * gradients[3 * edge + 2]};    // on i
    for (int k = 0; k < 3; ++k) {
      f[i][k] += push[k];
      f[j][k] -= push[k];
    }
    if (cvflag_atom) add_centroid_virial(edge, push);
    if (!vflag_either) continue;
    const double v[6] = {d[0] * push[0],
                         d[1] * push[1],
                         d[2] * push[2],
                         0.5 * (d[0] * push[1] + d[1] * push[0]),
                         0.5 * (d[0] * push[2] + d[2] * push[0]),
                         0.5 * (d[1] * push[2] + d[2] * push[1])};
    for (int k = 0; k < 6; ++k) {
      if (vflag_global) virial[k] += v[k];
      if (vflag_atom) {
        vatom[i][k] += 0.5 * v[k];
        vatom[j][k] += 0.5 * v[k];
      }
    }
  }
}

// W_ab = sum_m (r_m - r_i)_a dU_m/dr_ib of an atom i, over the energies U_m of all atoms: the heat flux of the
// potential is the sum of W_i v_i. An edge has its gradient and the moment of that about the receiver
// (csrc/model/moments.h).
void PairEqaccel::add_centroid_virial(size_t edge, const double push[3])
{
  static constexpr int order[9][2] = {{0, 0}, {1, 1}, {2, 2}, {0, 1}, {0, 2}, {1, 2}, {1, 0}, {2, 0}, {2, 1}};
  const int i = nodes.atoms()[edges.receivers[edge]], j = edges.sending_atoms[edge];
  for (int k = 0; k < 9; ++k) {
    const auto [a, b] = order[k];
    const double of_receiver = energy_unit * moments[9 * edge + 3 * a + b];
    cvatom[i][k] += of_receiver;
    cvatom[j][k] += edges.vectors[3 * edge + a] * push[b] - of_receiver;
  }
}

void PairEqaccel::add_kept_results()
{
  const eqaccel::StepResult &found = kept.results();
  const std::vector<int> &atoms = kept.atoms();
  for (size_t n = 0; n < found.energies.size(); ++n) {
    const double energy = energy_unit * found.energies[n];
    if (eflag_global) eng_vdwl += energy;
    if (eflag_atom) eatom[atoms[n]] += energy;
  }
  for (size_t n = 0; n < atoms.size(); ++n)
    for (int k = 0; k < 3; ++k) atom->f[atoms[n]][k] += energy_unit * found.forces[3 * n + k];
  if (!vflag_global) return;
  const int places[6] = {0, 4, 8, 1, 2, 5};    // xx yy zz xy xz yz
  for (int k = 0; k < 6; ++k) virial[k] -= energy_unit * found.virial[places[k]];
}

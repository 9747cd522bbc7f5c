// SPDX-License-Identifier: GPL-2.0-only
#include "kept_steps.h"

#include "atom.h"
#include "comm.h"
#include "domain.h"
#include "neigh_list.h"
#include "rank_nodes.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>

using namespace LAMMPS_NS;

// Of what rounding may do to the place of an image, relative to the box and to the place itself.
static constexpr double rounding = 1e-10;

std::string KeptSteps::prepare(eqaccel::Model &model, const Source &source)
{
  source.nodes.number(source.takes_part);
  if (!holds || took_part != source.takes_part) collect(model, source);
  if (atom_of_node.empty() && lmp->comm->nprocs == 1) return "no atoms of the model";
  if (!images_are_in_place(source.nodes)) return "ghosts that are no periodic images";
  const Atom *atom = lmp->atom;
  positions.clear();
  types.clear();
  for (int i : atom_of_node) {
    positions.insert(positions.end(), atom->x[i], atom->x[i] + 3);
    types.push_back(source.element_of_type[atom->type[i]]);
  }
  return "";
}

void KeptSteps::evaluate(eqaccel::Model &model, RankNodes *exchange)
{
  const double *h = lmp->domain->h;    // xx yy zz yz xz xy
  const double cell[9] = {h[0], 0, 0, h[5], h[1], 0, h[4], h[3], h[2]};
  if (!atom_of_node.empty()) return model.step({positions.data(), cell, types.data()}, exchange, result);
  result = {};
  result.nearest = std::numeric_limits<double>::infinity();
  exchange->take_part();
}

// Written so that NaN fails.
std::string KeptSteps::failure(double overlap) const
{
  if (!result.obstacle.empty()) return result.obstacle;
  const auto finite = [](double value) { return std::isfinite(value); };
  if (!(result.nearest > 2 * overlap)) return "atoms that are very near";
  const bool all = std::all_of(result.energies.begin(), result.energies.end(), finite) &&
                   std::all_of(result.forces.begin(), result.forces.end(), finite);
  return all ? "" : "results that are not finite";
}

void KeptSteps::collect(eqaccel::Model &model, const Source &source)
{
  const Atom *atom = lmp->atom;
  const RankNodes &nodes = source.nodes;
  const int nall = atom->nlocal + atom->nghost;
  holds = false;
  took_part = source.takes_part;
  find_shifts(nodes);
  owners.assign(nall, 0);
  receivers.clear();
  senders.clear();
  for (int ii = 0; ii < source.list->inum; ++ii) {
    const int i = source.list->ilist[ii];
    if (!took_part[i]) continue;
    for (int jj = 0; jj < source.list->numneigh[i]; ++jj) add(i, source.list->firstneigh[i][jj] & NEIGHMASK, nodes);
  }
  for (const auto &[i, j] : source.missing) add(i, j, nodes);
  atom_of_node = nodes.num_local() > 0 ? nodes.atoms() : std::vector<int>();    // else there is nothing to evaluate
  eqaccel::Candidates found;
  found.num_local = nodes.num_local();
  found.num_atoms = static_cast<int64_t>(atom_of_node.size());
  found.num_images = nall;
  found.num_pairs = static_cast<int64_t>(receivers.size());
  found.owners = owners.data();
  found.shifts = shifts.data();
  found.receivers = receivers.data();
  found.senders = senders.data();
  if (!atom_of_node.empty()) model.keep(found);
  holds = true;
}

void KeptSteps::add(int i, int j, const RankNodes &nodes)
{
  if (!took_part[i] || !took_part[j] || !took_part[nodes.original_of(j)]) return;
  receivers.push_back(static_cast<int32_t>(nodes.node(i)));
  senders.push_back(j);
  owners[j] = static_cast<int32_t>(nodes.node(j));
}

// By how many cell vectors each ghost is away from its atom.
void KeptSteps::find_shifts(const RankNodes &nodes)
{
  const Atom *atom = lmp->atom;
  const double *inverse = lmp->domain->h_inv;
  shifts.assign(3 * static_cast<size_t>(atom->nlocal + atom->nghost), 0);
  for (int j = atom->nlocal; j < atom->nlocal + atom->nghost; ++j) {
    const double *x = atom->x[j], *from = atom->x[nodes.original_of(j)];
    const double d[3] = {x[0] - from[0], x[1] - from[1], x[2] - from[2]};
    const double turns[3] = {inverse[0] * d[0] + inverse[5] * d[1] + inverse[4] * d[2],
                             inverse[1] * d[1] + inverse[3] * d[2], inverse[2] * d[2]};
    for (int k = 0; k < 3; ++k)
      shifts[3 * static_cast<size_t>(j) + k] = static_cast<int32_t>(std::lround(std::clamp(turns[k], -1e6, 1e6)));
  }
}

bool KeptSteps::images_are_in_place(const RankNodes &nodes) const
{
  const Atom *atom = lmp->atom;
  const double *h = lmp->domain->h;
  const double size = std::fabs(h[0]) + std::fabs(h[1]) + std::fabs(h[2]);
  for (int j = atom->nlocal; j < atom->nlocal + atom->nghost; ++j) {
    if (!took_part[j]) continue;
    const int32_t *n = &shifts[3 * static_cast<size_t>(j)];
    const double *x = atom->x[j], *from = atom->x[nodes.original_of(j)];
    const double away[3] = {n[0] * h[0] + n[1] * h[5] + n[2] * h[4], n[1] * h[1] + n[2] * h[3], n[2] * h[2]};
    for (int k = 0; k < 3; ++k)
      if (!(std::fabs(x[k] - from[k] - away[k]) <= rounding * (size + std::fabs(x[k])))) return false;
  }
  return true;
}

std::string KeptSteps::note(const eqaccel::Model &model) const
{
  std::string text = model.steps_note(), by_host;
  for (const auto &[reason, count] : left)
    by_host += (by_host.empty() ? "" : ", ") + std::to_string(count) + " for " + reason;
  if (!by_host.empty()) text += (text.empty() ? "" : "; ") + ("steps of the host: " + by_host);
  return text;
}

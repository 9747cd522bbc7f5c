// SPDX-License-Identifier: GPL-2.0-only
#include "missing_neighbors.h"

#include "atom.h"
#include "error.h"
#include "neigh_list.h"
#include "neighbor.h"

using namespace LAMMPS_NS;

void MissingNeighbors::find(const NeighList *list, const std::vector<int> &element_of_type)
{
  found.clear();
  const int *flags = lmp->neighbor->special_flag;    // 0: left out; 1 and 2: in the list, plain and marked
  const Atom *atom = lmp->atom;
  if (atom->molecular == Atom::ATOMIC || (flags[1] && flags[2] && flags[3])) return;
  if (atom->molecular == Atom::TEMPLATE || atom->map_style == Atom::MAP_NONE)
    lmp->error->all(FLERR,
                    "pair_style eqaccel needs all pairs, and with {} it can not find those that special_bonds leaves "
                    "out: set special_bonds lj/coul 1e-50 1e-50 1e-50, which keeps them and is 0 to other styles",
                    atom->molecular == Atom::TEMPLATE ? "atom_style template" : "atom_modify map none");
  listed_for.assign(atom->nlocal + atom->nghost, -1);
  for (int ii = 0; ii < list->inum; ++ii) {
    const int i = list->ilist[ii];
    if (atom->nspecial[i][2] > 0 && element_of_type[atom->type[i]] >= 0) find_for(i, list, element_of_type);
  }
}

void MissingNeighbors::find_for(int i, const NeighList *list, const std::vector<int> &element_of_type)
{
  Atom *atom = lmp->atom;
  for (int jj = 0; jj < list->numneigh[i]; ++jj) listed_for[list->firstneigh[i][jj] & NEIGHMASK] = i;
  for (int k = 0, degree = 1; k < atom->nspecial[i][2]; ++k) {
    while (k >= atom->nspecial[i][degree - 1]) ++degree;    // the counts of 1-2, 1-3 and 1-4 neighbours add up
    if (lmp->neighbor->special_flag[degree] != 0) continue;
    for (int j = atom->map(atom->special[i][k]); j >= 0; j = atom->sametag[j]) {
      if (listed_for[j] == i || element_of_type[atom->type[j]] < 0) continue;
      listed_for[j] = i;
      found.emplace_back(i, j);
    }
  }
}

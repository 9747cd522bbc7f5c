// SPDX-License-Identifier: GPL-2.0-only
#include "exclusions.h"

#include "atom.h"
#include "group.h"
#include "lammps.h"
#include "neighbor.h"

using namespace LAMMPS_NS;

bool LAMMPS_NS::excludes_neighbors(LAMMPS *lmp, const int *const *setflag, const std::vector<int> &element_of_type)
{
  const Neighbor *neighbor = lmp->neighbor;
  const Atom *atom = lmp->atom;
  bool found = false;
  for (int m = 0; m < neighbor->nex_type; ++m) found |= setflag[neighbor->ex1_type[m]][neighbor->ex2_type[m]] != 0;
  const auto any = [&](const auto &counts) {
    int here = 0, anywhere = 0;
    for (int i = 0; i < atom->nlocal; ++i) here |= element_of_type[atom->type[i]] >= 0 && counts(atom->mask[i]);
    MPI_Allreduce(&here, &anywhere, 1, MPI_INT, MPI_MAX, lmp->world);
    return anywhere != 0;
  };
  // Fixes keep groups for exclusions that are empty but for a moment, so groups count by who is in them.
  const auto present = [&](int number) {
    return any([&](int groups) { return (groups & lmp->group->bitmask[number]) != 0; });
  };
  for (int m = 0; m < neighbor->nex_group; ++m)
    found |= present(neighbor->ex1_group[m]) && present(neighbor->ex2_group[m]);
  for (int m = 0; m < neighbor->nex_mol; ++m) found |= present(neighbor->ex_mol_group[m]);
  // Where all atoms have lists, this is the group of all.
  const int included = lmp->group->bitmask[neighbor->includegroup];
  return found | any([&](int groups) { return (groups & included) == 0; });
}

void LAMMPS_NS::find_participants(LAMMPS *lmp, const std::vector<int> &element_of_type, std::vector<char> &takes_part)
{
  const Neighbor *neighbor = lmp->neighbor;
  const Atom *atom = lmp->atom;
  const int *bitmask = lmp->group->bitmask;
  int absent = 0;
  for (int m = 0; m < neighbor->nex_group; ++m) {
    if (neighbor->ex2_group[m] == 0) absent |= bitmask[neighbor->ex1_group[m]];    // 0: the group "all"
    if (neighbor->ex1_group[m] == 0) absent |= bitmask[neighbor->ex2_group[m]];
  }
  takes_part.resize(atom->nlocal + atom->nghost);
  for (size_t i = 0; i < takes_part.size(); ++i)
    takes_part[i] = element_of_type[atom->type[i]] >= 0 && !(atom->mask[i] & absent);
}

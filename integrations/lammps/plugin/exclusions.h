// SPDX-License-Identifier: GPL-2.0-only
//
// What `neigh_modify exclude` and `include` take from a model: neighbours, or atoms as a whole.
#ifndef EQACCEL_EXCLUSIONS_H
#define EQACCEL_EXCLUSIONS_H

#include <vector>

namespace LAMMPS_NS
{
class LAMMPS;

// Whether atoms of the model have no edges between them because of an exclusion, or because lists are for some of them
// alone, which is another energy than the model's. Collective. Pairs of types of the model have a flag; an atom of it
// has an element, which others have not (-1).
bool excludes_neighbors(LAMMPS *lmp, const int *const *setflag, const std::vector<int> &element_of_type);

// Of every atom, ghosts too, whether it takes part: it has an element, and is not excluded from all others. One that is
// excluded so is taken out of the system, as fix gcmc does to see what energy is left without it: not even its constant
// energy counts.
void find_participants(LAMMPS *lmp, const std::vector<int> &element_of_type, std::vector<char> &takes_part);

}    // namespace LAMMPS_NS

#endif

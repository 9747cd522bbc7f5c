// SPDX-License-Identifier: GPL-2.0-only
//
// The neighbours that LAMMPS leaves out of a list because of bonds (`special_bonds` 0), which a model needs all the
// same: its energy depends on where they are, and knows no bonds.
#ifndef EQACCEL_MISSING_NEIGHBORS_H
#define EQACCEL_MISSING_NEIGHBORS_H

#include <utility>
#include <vector>

namespace LAMMPS_NS
{
class LAMMPS;
class NeighList;

class MissingNeighbors
{
 public:
  explicit MissingNeighbors(LAMMPS *lmp) : lmp(lmp) {}

  // Looks through a list that has just been built, for atoms of the types that have an element. All images of a bonded
  // atom that the list does not hold are found, however far they are.
  void find(const NeighList *list, const std::vector<int> &element_of_type);

  // Local atom and neighbour.
  const std::vector<std::pair<int, int>> &pairs() const { return found; }

 private:
  void find_for(int i, const NeighList *list, const std::vector<int> &element_of_type);

  LAMMPS *lmp;
  std::vector<std::pair<int, int>> found;
  std::vector<int> listed_for;    // of every atom: the last local atom that had it in its list
};

}    // namespace LAMMPS_NS

#endif

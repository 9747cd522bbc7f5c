// SPDX-License-Identifier: GPL-2.0-only
//
// Steps on lists that stay on the device of the model: pairs of atoms go there when LAMMPS has rebuilt its list, and in
// a step positions go there, of ghosts too where there are several ranks, and energies, forces and the virial come
// back.
#ifndef EQACCEL_KEPT_STEPS_H
#define EQACCEL_KEPT_STEPS_H

#include "eqaccel/model.h"

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace LAMMPS_NS
{
class LAMMPS;
class NeighList;
class RankNodes;

class KeptSteps
{
 public:
  explicit KeptSteps(LAMMPS *lmp) : lmp(lmp) {}

  // LAMMPS has another list, or other atoms.
  void forget() { holds = false; }

  // What a list is collected from.
  struct Source {
    const NeighList *list;
    const std::vector<std::pair<int, int>> &missing; // pairs that the list lacks: local atom and neighbour
    RankNodes &nodes;
    const std::vector<char> &takes_part; // of every atom, ghosts too
    const std::vector<int> &element_of_type;
  };

  // A step in parts, for what all ranks have to agree on between them. Those that return a string say why the host has
  // to do the step: what is unusual in it is told from there.
  std::string prepare(eqaccel::Model &model, const Source &source);
  void evaluate(eqaccel::Model &model, RankNodes *exchange);
  std::string failure(double overlap) const;
  // Notes a step that the host does, and why.
  void leave(const std::string &reason) { ++left[reason]; }
  // What there is to say at the end of a run.
  std::string note(const eqaccel::Model &model) const;

  // Of the last step: the atoms of the nodes, the local ones that take part before those of ghosts.
  const std::vector<int> &atoms() const { return atom_of_node; }
  const eqaccel::StepResult &results() const { return result; }

 private:
  void collect(eqaccel::Model &model, const Source &source);
  void add(int i, int j, const RankNodes &nodes);
  void find_shifts(const RankNodes &nodes);
  bool images_are_in_place(const RankNodes &nodes) const;

  LAMMPS *lmp;
  bool holds = false; // whether the model has the list
  std::vector<char> took_part; // when the list was collected
  std::vector<int> atom_of_node;
  std::vector<int32_t> owners, shifts, receivers, senders;
  std::vector<double> positions;
  std::vector<int64_t> types;
  eqaccel::StepResult result;
  std::map<std::string, int64_t> left; // steps of the host, by the reason
};

} // namespace LAMMPS_NS

#endif

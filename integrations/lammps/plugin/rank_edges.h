// SPDX-License-Identifier: GPL-2.0-only
//
// Edges of a rank that the host picks in every step, out of pairs that are kept from one list of LAMMPS to the next.
#ifndef EQACCEL_RANK_EDGES_H
#define EQACCEL_RANK_EDGES_H

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace LAMMPS_NS
{
class LAMMPS;
class NeighList;
class RankNodes;

class RankEdges
{
 public:
  explicit RankEdges(LAMMPS *lmp) : lmp(lmp) {}

  // LAMMPS has another list, or other atoms.
  void forget() { holds = false; }
  // Takes the pairs of a list, unless those of the last one are still good, and numbers the nodes of this rank.
  // `missing` are pairs that the list lacks, local atom and neighbour, in the order of the list's atoms.
  void collect(const NeighList *list, const std::vector<std::pair<int, int>> &missing, RankNodes &nodes,
               const std::vector<char> &takes_part);
  // Picks the edges of a step. Returns two atoms that are nearer than `overlap`, where it stops, or nothing (-1, -1).
  std::pair<int, int> pick(double cutoff, double overlap);

  size_t count() const { return sending_atoms.size(); }
  double memory_usage() const;

  // In the order of nodes that receive, then of those that send.
  std::vector<int64_t> senders, receivers;    // nodes
  std::vector<int> sending_atoms;             // the image that an edge comes from: its force goes there
  std::vector<double> vectors;                // (edges, 3)

 private:
  struct Pair {
    int to, from;                // atoms
    int32_t receiver, sender;    // nodes
  };
  void resize(size_t edges);

  LAMMPS *lmp;
  bool holds = false;             // whether pairs are those of the list
  std::vector<char> took_part;    // when they were collected
  std::vector<Pair> pairs;
};

}    // namespace LAMMPS_NS

#endif

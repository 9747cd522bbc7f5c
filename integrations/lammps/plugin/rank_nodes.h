// SPDX-License-Identifier: GPL-2.0-only
//
// The atoms of one rank as nodes of a graph, and the exchange of rows of ghost nodes between ranks.
//
// LAMMPS keeps a ghost for every periodic image. Images of an atom have one and the same row of node features, so they
// are one node: the local one if the atom is here, else one for all of its ghosts. On one rank no ghost node is left.
#ifndef EQACCEL_RANK_NODES_H
#define EQACCEL_RANK_NODES_H

#include "eqaccel/exchange.h"

#include <cstddef>
#include <vector>

namespace LAMMPS_NS
{
class LAMMPS;
class Pair;

class RankNodes final : public eqaccel::GhostExchange
{
 public:
  RankNodes(LAMMPS *lmp, Pair *pair) : lmp(lmp), pair(pair) {}

  // Number of columns and dtype of every exchange that the model makes in one step.
  void expect_exchanges(const std::vector<int64_t> &widths, bool is_double);
  // How many doubles of an atom travel at most: what LAMMPS sizes its buffers by.
  int max_doubles() const;

  // Finds the owner of every ghost. All ranks call this together, whenever the ghosts have changed.
  void find_owners();
  // The local atom that an atom is an image of, itself if it is local; on several ranks perhaps a ghost.
  int original_of(int atom) const { return original[atom]; }

  // Numbers the local atoms that take part, in order. Ghosts get numbers when they are first asked for, which hold
  // until others take part, or owners are found again.
  void number(const std::vector<char> &takes_part);
  // Starts a step. Its exchanges go back so many times.
  void start(int passes_back);
  // The node of an atom that takes part; a ghost becomes a node when it is first asked for.
  int64_t node(int atom);
  int64_t num_local() const { return local; }
  const std::vector<int> &atoms() const { return atom_of_node; }    // the atom of every node

  void forward(void *rows, int64_t num_nodes, int64_t width, bool is_double) override;
  void reverse(void *rows, int64_t num_nodes, int64_t width, bool is_double) override;
  // What a rank without nodes does while the others evaluate the model.
  void take_part();

  int pack_forward(int n, const int *list, double *buffer) const;
  void unpack_forward(int n, int first, const double *buffer);
  int pack_reverse(int n, int first, double *buffer) const;
  void unpack_reverse(int n, const int *list, const double *buffer);

 private:
  double *row(int atom) { return rows_of_atoms.data() + static_cast<size_t>(atom) * doubles; }
  const double *row(int atom) const { return rows_of_atoms.data() + static_cast<size_t>(atom) * doubles; }
  int doubles_of(int64_t width) const { return static_cast<int>(is_double ? width : (width + 1) / 2); }
  void expect(size_t number, int64_t width, bool is_double) const;

  LAMMPS *lmp;
  Pair *pair;
  std::vector<int64_t> widths;
  bool is_double = true;
  size_t done = 0;    // exchanges of this step that went forward and have not yet come back in this pass
  int passes = 1;     // back, of this step, that have not ended

  std::vector<int> original; // of every atom: the local atom it is an image of, or its rank's first such ghost
  bool numbered = false;
  std::vector<char> took_part;       // when nodes were numbered
  std::vector<int64_t> node_of_atom; // -1: none yet
  std::vector<int> atom_of_node;
  int64_t local = 0;

  std::vector<double> rows_of_atoms; // floats travel two to a double
  int doubles = 1; // of a row, in the exchange under way
};

} // namespace LAMMPS_NS

#endif

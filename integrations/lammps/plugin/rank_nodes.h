// SPDX-License-Identifier: GPL-2.0-only
//
// The atoms of one rank as nodes of a graph, and the exchange of rows of ghost nodes between ranks.
//
// LAMMPS keeps a ghost for every periodic image. Images of an atom have one and the same row of node features, so they
// are one node: the local one if the atom is here, else one for all of its ghosts. On one rank no ghost node is left.
#ifndef EQACCEL_RANK_NODES_H
#define EQACCEL_RANK_NODES_H

#include "eqaccel/exchange.h"
#include "ghost_messages.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace LAMMPS_NS
{
class LAMMPS;
class Pair;

class RankNodes final : public eqaccel::GhostExchange
{
 public:
  RankNodes(LAMMPS *lmp, Pair *pair) : lmp(lmp), pair(pair), messages(lmp) {}

  // Number of columns and dtype of every exchange that the model makes in one step.
  void expect_exchanges(const std::vector<int64_t> &widths, bool is_double);

  // Finds the owner of every ghost. All ranks call this together, whenever the ghosts have changed.
  void find_owners();
  // The local atom that an atom is an image of, itself if it is local; on several ranks perhaps a ghost.
  int original_of(int atom) const { return original[atom]; }

  // Numbers the atoms that take part: the local ones in order, then ghosts, one for all images of an atom. Numbers hold
  // until others take part, or owners are found again.
  void number(const std::vector<char> &takes_part);
  // Starts a step. Its exchanges go back so many times.
  void start(int passes_back);
  // The node of an atom that takes part.
  int64_t node(int atom) const { return node_of_atom[original[atom]]; }
  int64_t num_local() const { return local; }
  const std::vector<int> &atoms() const { return atom_of_node; }    // the atom of every node

  void nodes(eqaccel::GhostNodes &found) const override;
  void forward(const void *rows, void *ghost_rows, int64_t width, bool is_double) override;
  void reverse(const void *ghost_rows, void *rows, int64_t width, bool is_double) override;
  // What a rank without nodes of its own does while the others evaluate the model.
  void take_part();

  int pack_owners(int n, const int *list, double *buffer) const;
  void unpack_owners(int n, int first, const double *buffer);

 private:
  // Rank and local number of an atom, in the bits of the double that travels.
  struct Owner {
    int32_t rank, atom;
  };
  static_assert(sizeof(Owner) == sizeof(double), "an owner travels as one double");
  void expect(size_t number, int64_t width, bool is_double) const;

  LAMMPS *lmp;
  Pair *pair;
  GhostMessages messages;
  std::vector<int64_t> widths;
  bool is_double = true;
  size_t done = 0;    // exchanges of this step that went forward and have not yet come back in this pass
  int passes = 1;     // back, of this step, that have not ended

  std::vector<Owner> owner_of_atom;
  std::vector<int> original;    // of every atom: the local atom it is an image of, or its rank's first such ghost
  bool numbered = false;
  std::vector<char> took_part;          // when nodes were numbered
  std::vector<int64_t> node_of_atom;    // of originals that take part; -1: none
  std::vector<int> atom_of_node;
  int64_t local = 0;
  std::vector<int64_t> sent, ends;    // as GhostNodes
};

}    // namespace LAMMPS_NS

#endif

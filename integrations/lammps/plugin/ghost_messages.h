// SPDX-License-Identifier: GPL-2.0-only
//
// Rows of ghosts that travel between ranks, from the rank that owns an atom straight to those that have it as a ghost,
// once whatever the number of its images.
#ifndef EQACCEL_GHOST_MESSAGES_H
#define EQACCEL_GHOST_MESSAGES_H

#include <cstddef>
#include <cstdint>
#include <vector>

namespace LAMMPS_NS
{
class LAMMPS;

class GhostMessages
{
 public:
  explicit GhostMessages(LAMMPS *lmp) : lmp(lmp) {}

  // An atom of another rank: which rank, its number there, and here that of the ghost.
  struct Ghost {
    int32_t rank, owner;
    int atom;
  };

  // All rows that a rank gives another one, or gets from it, in one order on both ends.
  struct Message {
    int rank;
    std::vector<int> atoms;         // here
    std::vector<char> has_row;      // of every atom; what has none travels as zeros
    size_t first = 0, rows = 0;     // where the rows are among those of all messages

    bool is_complete() const { return rows == atoms.size(); }
  };

  // Asks the owners for the rows of ghosts, each once. Collective.
  void agree(std::vector<Ghost> ghosts);
  // Says which atoms have rows from now on, by a node that is not negative.
  void find_rows(const std::vector<int64_t> &node_of_atom);

  // To the ranks that have atoms of this one as ghosts, and from those that own the ghosts here.
  const std::vector<Message> &given() const { return to_others; }
  const std::vector<Message> &taken() const { return from_others; }

  // Sends rows of atoms to where they are ghosts, or rows of ghosts to their owners. `from` holds the rows of all
  // messages that go, and `to` gets those of all that come.
  void forward(const char *from, char *to, int64_t width, bool is_double);
  void reverse(const char *from, char *to, int64_t width, bool is_double);

 private:
  void travel(const std::vector<Message> &out, const char *from, const std::vector<Message> &in, char *to,
              int64_t width, bool is_double);

  LAMMPS *lmp;
  std::vector<Message> to_others, from_others;    // by ascending rank
};

}    // namespace LAMMPS_NS

#endif

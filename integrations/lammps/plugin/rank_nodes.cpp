// SPDX-License-Identifier: GPL-2.0-only
#include "rank_nodes.h"

#include "atom.h"
#include "comm.h"
#include "lammps.h"
#include "pair.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>

using namespace LAMMPS_NS;

void RankNodes::expect_exchanges(const std::vector<int64_t> &of_model, bool model_is_double)
{
  widths = of_model;
  is_double = model_is_double;
}

void RankNodes::find_owners()
{
  numbered = false;
  const int nlocal = lmp->atom->nlocal, nall = nlocal + lmp->atom->nghost, me = lmp->comm->me;
  owner_of_atom.assign(nall, {});
  for (int i = 0; i < nlocal; ++i) owner_of_atom[i] = {me, i};
  lmp->comm->forward_comm(pair);

  original.resize(nall);
  std::unordered_map<int64_t, int> first_ghost;
  std::vector<GhostMessages::Ghost> ghosts;
  for (int i = 0; i < nall; ++i) {
    const Owner owner = owner_of_atom[i];
    original[i] = owner.atom;
    if (owner.rank == me) continue;
    const int64_t key = (static_cast<int64_t>(owner.rank) << 32) | owner.atom;
    const auto [found, is_new] = first_ghost.emplace(key, i);
    original[i] = found->second;
    if (is_new) ghosts.push_back({owner.rank, owner.atom, i});
  }
  messages.agree(std::move(ghosts));
}

void RankNodes::number(const std::vector<char> &takes_part)
{
  if (numbered && took_part == takes_part) return;
  numbered = true;
  took_part = takes_part;
  node_of_atom.assign(original.size(), -1);
  atom_of_node.clear();
  const auto add = [this](int atom) {
    if (!took_part[atom]) return;
    node_of_atom[atom] = static_cast<int64_t>(atom_of_node.size());
    atom_of_node.push_back(atom);
  };
  for (int i = 0; i < lmp->atom->nlocal; ++i) add(i);
  local = static_cast<int64_t>(atom_of_node.size());
  for (const auto &message : messages.taken())    // in their order, so that what comes has its place
    for (int atom : message.atoms) add(atom);

  messages.find_rows(node_of_atom);
  sent.clear();
  ends.clear();
  for (const auto &message : messages.given()) {
    for (int atom : message.atoms)
      if (node_of_atom[atom] >= 0) sent.push_back(node_of_atom[atom]);
    ends.push_back(static_cast<int64_t>(message.first + message.rows));
  }
}

void RankNodes::start(int passes_back)
{
  done = 0;
  passes = passes_back;
}

// A wrong width would run over what the other ranks send, and a wrong number of exchanges would leave them waiting.
void RankNodes::expect(size_t number, int64_t width, bool rows_are_double) const
{
  if (number < widths.size() && widths[number] == width && rows_are_double == is_double) return;
  throw std::runtime_error("the model asks for an exchange of width " + std::to_string(width) +
                           ", which is not the next one that its file lists: export it again");
}

void RankNodes::nodes(eqaccel::GhostNodes &found) const
{
  found.num_ghosts = static_cast<int64_t>(atom_of_node.size()) - local;
  found.num_messages = static_cast<int64_t>(ends.size());
  found.ends = ends.data();
  found.sent = sent.data();
}

void RankNodes::forward(const void *rows, void *ghost_rows, int64_t width, bool rows_are_double)
{
  expect(done++, width, rows_are_double);
  messages.forward(static_cast<const char *>(rows), static_cast<char *>(ghost_rows), width, is_double);
}

void RankNodes::reverse(const void *ghost_rows, void *rows, int64_t width, bool rows_are_double)
{
  if (done == 0 && passes > 1) {
    done = widths.size();
    --passes;
  }
  expect(--done, width, rows_are_double);
  messages.reverse(static_cast<const char *>(ghost_rows), static_cast<char *>(rows), width, is_double);
}

// Its ghosts ask for rows and give none.
void RankNodes::take_part()
{
  int64_t most = 0;
  for (int64_t width : widths) most = std::max(most, width);
  std::vector<double> ghost_rows((atom_of_node.size() - local) * most, 0.0);
  for (int64_t width : widths) forward(nullptr, ghost_rows.data(), width, is_double);
  std::fill(ghost_rows.begin(), ghost_rows.end(), 0.0);
  for (int pass = passes; pass > 0; --pass)
    for (size_t k = widths.size(); k > 0; --k) reverse(ghost_rows.data(), nullptr, widths[k - 1], is_double);
}

int RankNodes::pack_owners(int n, const int *list, double *buffer) const
{
  for (int i = 0; i < n; ++i) std::memcpy(buffer + i, &owner_of_atom[list[i]], sizeof(Owner));
  return n;
}

void RankNodes::unpack_owners(int n, int first, const double *buffer)
{
  std::memcpy(&owner_of_atom[first], buffer, n * sizeof(Owner));
}

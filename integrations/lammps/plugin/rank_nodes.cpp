// SPDX-License-Identifier: GPL-2.0-only
#include "rank_nodes.h"

#include "atom.h"
#include "comm.h"
#include "lammps.h"
#include "pair.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <unordered_map>

using namespace LAMMPS_NS;

namespace
{

// Rank and local number of an atom, in the bits of the double that travels.
struct Owner {
  int32_t rank, atom;
};
static_assert(sizeof(Owner) == sizeof(double), "an owner travels as one double");

template <class Scalar> void add(double *to, const double *from, int doubles)
{
  auto *sum = reinterpret_cast<Scalar *>(to);
  const auto *term = reinterpret_cast<const Scalar *>(from);
  const auto *end = reinterpret_cast<const Scalar *>(from + doubles);
  while (term != end) *sum++ += *term++;
}

}    // namespace

void RankNodes::expect_exchanges(const std::vector<int64_t> &of_model, bool model_is_double)
{
  widths = of_model;
  is_double = model_is_double;
}

int RankNodes::max_doubles() const
{
  int most = 1;    // an owner
  for (int64_t width : widths) most = std::max(most, doubles_of(width));
  return most;
}

void RankNodes::find_owners()
{
  numbered = false;
  const int nlocal = lmp->atom->nlocal, nall = nlocal + lmp->atom->nghost, me = lmp->comm->me;
  doubles = 1;
  rows_of_atoms.assign(nall, 0.0);
  for (int i = 0; i < nlocal; ++i) {
    const Owner owner{me, i};
    std::memcpy(row(i), &owner, sizeof owner);
  }
  pair->comm_forward = doubles;
  lmp->comm->forward_comm(pair);
  pair->comm_forward = max_doubles();

  original.resize(nall);
  std::unordered_map<int64_t, int> first_ghost;
  for (int i = 0; i < nall; ++i) {
    Owner owner;
    std::memcpy(&owner, row(i), sizeof owner);
    const int64_t key = (static_cast<int64_t>(owner.rank) << 32) | owner.atom;
    original[i] = owner.rank == me ? owner.atom : first_ghost.emplace(key, i).first->second;
  }
}

void RankNodes::number(const std::vector<char> &takes_part)
{
  if (numbered && took_part == takes_part) return;
  numbered = true;
  took_part = takes_part;
  const int nlocal = lmp->atom->nlocal;
  node_of_atom.assign(original.size(), -1);
  atom_of_node.clear();
  for (int i = 0; i < nlocal; ++i) {
    if (!takes_part[i]) continue;
    node_of_atom[i] = static_cast<int64_t>(atom_of_node.size());
    atom_of_node.push_back(i);
  }
  local = static_cast<int64_t>(atom_of_node.size());
}

void RankNodes::start(int passes_back)
{
  done = 0;
  passes = passes_back;
}

int64_t RankNodes::node(int atom)
{
  const int image = original[atom];
  int64_t &number = node_of_atom[image];
  if (number < 0) {
    number = static_cast<int64_t>(atom_of_node.size());
    atom_of_node.push_back(image);
  }
  return number;
}

// A wrong width would run over LAMMPS's buffers, and a wrong number of exchanges would leave the other ranks waiting.
void RankNodes::expect(size_t number, int64_t width, bool rows_are_double) const
{
  if (number < widths.size() && widths[number] == width && rows_are_double == is_double) return;
  throw std::runtime_error("the model asks for an exchange of width " + std::to_string(width) +
                           ", which is not the next one that its file lists: export it again");
}

void RankNodes::forward(void *rows, int64_t num_nodes, int64_t width, bool rows_are_double)
{
  expect(done++, width, rows_are_double);
  const size_t bytes = width * (is_double ? sizeof(double) : sizeof(float));
  auto *given = static_cast<char *>(rows);
  doubles = doubles_of(width);
  rows_of_atoms.resize(original.size() * doubles);
  for (int64_t k = 0; k < local; ++k) std::memcpy(row(atom_of_node[k]), given + k * bytes, bytes);
  pair->comm_forward = doubles;
  lmp->comm->forward_comm(pair);
  pair->comm_forward = max_doubles();
  const auto known = std::min(num_nodes, static_cast<int64_t>(atom_of_node.size()));
  for (int64_t k = local; k < known; ++k) std::memcpy(given + k * bytes, row(atom_of_node[k]), bytes);
}

void RankNodes::reverse(void *rows, int64_t num_nodes, int64_t width, bool rows_are_double)
{
  if (done == 0 && passes > 1) {
    done = widths.size();
    --passes;
  }
  expect(--done, width, rows_are_double);
  const size_t bytes = width * (is_double ? sizeof(double) : sizeof(float));
  auto *given = static_cast<char *>(rows);
  doubles = doubles_of(width);
  // The other images of a node must give nothing, and neither must the ghosts of a rank without nodes.
  rows_of_atoms.assign(original.size() * doubles, 0.0);
  const auto known = std::min(num_nodes, static_cast<int64_t>(atom_of_node.size()));
  for (int64_t k = 0; k < known; ++k) std::memcpy(row(atom_of_node[k]), given + k * bytes, bytes);
  pair->comm_reverse = doubles;
  lmp->comm->reverse_comm(pair);
  pair->comm_reverse = max_doubles();
  for (int64_t k = 0; k < local; ++k) std::memcpy(given + k * bytes, row(atom_of_node[k]), bytes);
}

void RankNodes::take_part()
{
  for (size_t k = 0; k < widths.size(); ++k) forward(nullptr, 0, widths[k], is_double);
  for (int pass = passes; pass > 0; --pass)
    for (size_t k = widths.size(); k > 0; --k) reverse(nullptr, 0, widths[k - 1], is_double);
}

int RankNodes::pack_forward(int n, const int *list, double *buffer) const
{
  for (int i = 0; i < n; ++i) std::copy_n(row(list[i]), doubles, buffer + static_cast<size_t>(i) * doubles);
  return n * doubles;
}

void RankNodes::unpack_forward(int n, int first, const double *buffer)
{
  std::copy_n(buffer, static_cast<size_t>(n) * doubles, row(first));
}

int RankNodes::pack_reverse(int n, int first, double *buffer) const
{
  std::copy_n(row(first), static_cast<size_t>(n) * doubles, buffer);
  return n * doubles;
}

void RankNodes::unpack_reverse(int n, const int *list, const double *buffer)
{
  for (int i = 0; i < n; ++i) {
    const double *from = buffer + static_cast<size_t>(i) * doubles;
    if (is_double)
      add<double>(row(list[i]), from, doubles);
    else
      add<float>(row(list[i]), from, doubles);
  }
}

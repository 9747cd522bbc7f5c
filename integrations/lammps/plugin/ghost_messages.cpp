// SPDX-License-Identifier: GPL-2.0-only
#include "ghost_messages.h"

#include "comm.h"
#include "lammps.h"

#include <algorithm>
#include <cstring>
#include <tuple>

using namespace LAMMPS_NS;

static constexpr int tag = 4117;    // of messages between ranks

void GhostMessages::agree(std::vector<Ghost> ghosts)
{
  to_others.clear();
  from_others.clear();
#ifndef MPI_STUBS    // LAMMPS's own, for one rank
  const auto order = [](const Ghost &ghost) { return std::tuple(ghost.rank, ghost.owner); };
  std::sort(ghosts.begin(), ghosts.end(), [=](const Ghost &a, const Ghost &b) { return order(a) < order(b); });
  std::vector<int> wanted(lmp->comm->nprocs, 0), asked(lmp->comm->nprocs, 0);
  std::vector<int32_t> owners;
  for (const Ghost &ghost : ghosts) {
    if (wanted[ghost.rank]++ == 0) from_others.push_back({ghost.rank, {}, {}});
    from_others.back().atoms.push_back(ghost.atom);
    owners.push_back(ghost.owner);
  }
  MPI_Alltoall(wanted.data(), 1, MPI_INT, asked.data(), 1, MPI_INT, lmp->world);
  for (int rank = 0; rank < lmp->comm->nprocs; ++rank)
    if (asked[rank] > 0) to_others.push_back({rank, std::vector<int>(asked[rank]), {}});

  std::vector<MPI_Request> requests;
  for (Message &message : to_others)
    MPI_Irecv(message.atoms.data(), asked[message.rank], MPI_INT, message.rank, tag, lmp->world,
              &requests.emplace_back());
  const int32_t *next = owners.data();
  for (const Message &message : from_others) {
    MPI_Isend(next, wanted[message.rank], MPI_INT, message.rank, tag, lmp->world, &requests.emplace_back());
    next += message.atoms.size();
  }
  MPI_Waitall(static_cast<int>(requests.size()), requests.data(), MPI_STATUSES_IGNORE);
#endif
}

void GhostMessages::find_rows(const std::vector<int64_t> &node_of_atom)
{
  for (std::vector<Message> *messages : {&to_others, &from_others}) {
    size_t first = 0;
    for (Message &message : *messages) {
      message.has_row.clear();
      for (int atom : message.atoms) message.has_row.push_back(node_of_atom[atom] >= 0);
      message.first = first;
      message.rows = std::count(message.has_row.begin(), message.has_row.end(), 1);
      first += message.rows;
    }
  }
}

void GhostMessages::forward(const char *from, char *to, int64_t width, bool is_double)
{
  travel(to_others, from, from_others, to, width, is_double);
}

void GhostMessages::reverse(const char *from, char *to, int64_t width, bool is_double)
{
  travel(from_others, from, to_others, to, width, is_double);
}

// A message whose atoms all have rows needs no copy.
void GhostMessages::travel(const std::vector<Message> &out, const char *from, const std::vector<Message> &in, char *to,
                           int64_t width, bool is_double)
{
#ifndef MPI_STUBS
  const size_t bytes = width * (is_double ? sizeof(double) : sizeof(float));
  MPI_Datatype row;
  MPI_Type_contiguous(static_cast<int>(width), is_double ? MPI_DOUBLE : MPI_FLOAT, &row);
  MPI_Type_commit(&row);
  std::vector<MPI_Request> requests;
  std::vector<std::vector<char>> copies;
  copies.reserve(in.size() + out.size());    // they must stay where they are
  for (const Message &message : in) {
    char *place = to + message.first * bytes;
    if (!message.is_complete()) place = copies.emplace_back(message.atoms.size() * bytes).data();
    MPI_Irecv(place, static_cast<int>(message.atoms.size()), row, message.rank, tag, lmp->world,
              &requests.emplace_back());
  }
  for (const Message &message : out) {
    const char *place = from + message.first * bytes;
    if (!message.is_complete()) {
      std::vector<char> &copy = copies.emplace_back(message.atoms.size() * bytes);
      for (size_t k = 0, next = 0; k < message.atoms.size(); ++k)
        if (message.has_row[k]) std::memcpy(&copy[k * bytes], place + next++ * bytes, bytes);
      place = copy.data();
    }
    MPI_Isend(place, static_cast<int>(message.atoms.size()), row, message.rank, tag, lmp->world,
              &requests.emplace_back());
  }
  MPI_Waitall(static_cast<int>(requests.size()), requests.data(), MPI_STATUSES_IGNORE);
  MPI_Type_free(&row);
  auto copy = copies.begin();
  for (const Message &message : in) {
    if (message.is_complete()) continue;
    for (size_t k = 0, next = message.first; k < message.atoms.size(); ++k)
      if (message.has_row[k]) std::memcpy(to + next++ * bytes, copy->data() + k * bytes, bytes);
    ++copy;
  }
#endif
}

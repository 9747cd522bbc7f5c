// SPDX-License-Identifier: GPL-2.0-only
#include "rank_edges.h"

#include "atom.h"
#include "neigh_list.h"
#include "rank_nodes.h"

#include <algorithm>

using namespace LAMMPS_NS;

void RankEdges::collect(const NeighList *list, const std::vector<std::pair<int, int>> &missing, RankNodes &nodes,
                        const std::vector<char> &takes_part)
{
  nodes.number(takes_part);
  if (holds && took_part == takes_part) return;
  took_part = takes_part;
  pairs.clear();
  auto lacked = missing.begin();
  for (int ii = 0; ii < list->inum; ++ii) {
    const int i = list->ilist[ii];
    const size_t begin = pairs.size();
    const auto add = [&](int j) {
      if (took_part[i] && took_part[j])
        pairs.push_back({i, j, static_cast<int32_t>(nodes.node(i)), static_cast<int32_t>(nodes.node(j))});
    };
    for (int jj = 0; jj < list->numneigh[i]; ++jj) add(list->firstneigh[i][jj] & NEIGHMASK);
    for (; lacked != missing.end() && lacked->first == i; ++lacked) add(lacked->second);
    std::stable_sort(pairs.begin() + static_cast<std::ptrdiff_t>(begin), pairs.end(),
                     [](const Pair &a, const Pair &b) { return a.sender < b.sender; });
  }
  holds = true;
}

std::pair<int, int> RankEdges::pick(double cutoff, double overlap)
{
  const double *const *x = lmp->atom->x;
  resize(pairs.size());
  size_t edge = 0;
  for (const Pair &pair : pairs) {
    const double *to = x[pair.to], *from = x[pair.from];
    const double d[3] = {to[0] - from[0], to[1] - from[1], to[2] - from[2]};
    const double square = d[0] * d[0] + d[1] * d[1] + d[2] * d[2];
    if (!(square < cutoff * cutoff)) continue;
    if (square < overlap * overlap) return {pair.to, pair.from};
    senders[edge] = pair.sender;
    receivers[edge] = pair.receiver;
    sending_atoms[edge] = pair.from;
    std::copy_n(d, 3, &vectors[3 * edge++]);
  }
  resize(edge);
  return {-1, -1};
}

void RankEdges::resize(size_t edges)
{
  senders.resize(edges);
  receivers.resize(edges);
  sending_atoms.resize(edges);
  vectors.resize(3 * edges);
}

double RankEdges::memory_usage() const
{
  return static_cast<double>(sizeof(Pair) * pairs.capacity() + sizeof(double) * vectors.capacity() +
                             sizeof(int64_t) * (senders.capacity() + receivers.capacity()) +
                             sizeof(int) * sending_atoms.capacity());
}

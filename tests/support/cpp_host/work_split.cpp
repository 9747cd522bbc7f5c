// How many edges a block gets: arguments are the blocks that a device holds, their warps, the edges that each holds, whether
// these stream their weights, and edges and rows, none for a batch; prints the edges and the number of blocks.
#include <cstdio>
#include <cstdlib>

#include "work_split.h"

int main(int, char** given) {
  const auto number = [&](int n) { return std::atoll(given[n]); };
  const eqaccel::Blocks blocks{number(1), number(2), number(3), number(4) != 0};
  const int64_t edges = number(5), rows = number(6);
  const eq_work_split split = rows ? eqaccel::split_with_sums({edges, rows}, blocks, eqaccel::Direction::forward, true)
                                   : eqaccel::split_batch(edges, blocks);
  std::printf("split %d %lld\n", split.size, static_cast<long long>(eqaccel::ceil_div(edges, std::max(split.size, 1))));
}

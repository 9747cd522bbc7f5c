// How many slots of a graph a GPU block gets; preludes/gpu_work_split.h finds them. Measured on an H200, PERFORMANCE.md.
#pragma once
#include <algorithm>
#include <cstdint>

#include "abi.h"
#include "gpu_driver.h"
#include "kernel.h"

namespace eqaccel {

struct SlotsOfRows {
  int64_t slots, rows;
  int64_t mean() const { return ceil_div(slots, std::max<int64_t>(rows, 1)); }
};

// From PERFORMANCE.md, where 4 to 300 slots a block were tried on three graphs.
constexpr int64_t least_slots = 16;  // of a block of several warps
constexpr int64_t stages_of_short_rows = 4;  // rows taken together have so many times the slots of a block's stages
constexpr int64_t stages_of_equal_parts = 3;  // and parts of the backward so many times
constexpr int64_t few_resident = 2;  // blocks of a multiprocessor
constexpr int64_t most_rounds = 2;  // of a device over rows, where these may be dealt out in equal parts
constexpr int64_t idle_part = 4, idle_part_cheap = 8;  // if more than one in so many blocks would have no row
// In quarters. They go with those and were not varied one by one: measure before relying on them.
constexpr int64_t longest_row = 6;  // of the mean row: what is longer is cut
constexpr int64_t short_row = 5;  // of the slots of a block's stages: mean rows up to that are taken together
constexpr int64_t short_row_double = 10;  // the same in double backward

struct Blocks {
  int64_t count;  // that the device holds at a time
  int64_t warps, edges_held;  // of one, and edges in its stages
  bool streams_weights;  // whether an edge has so many that they are most of what is moved

  // A warp for itself takes all edges that it holds at a time; the warps of a larger block share the edges of a stage.
  bool take_all_at_once() const { return warps == 1; }
  int64_t fewest_slots() const { return take_all_at_once() ? edges_held : least_slots; }
};

inline eq_work_split equal_split(int64_t size) {
  return {0, 0, static_cast<int32_t>(size), 0, static_cast<int32_t>(size), nullptr};
}

// A batch: about a quarter of the edges of a device that is full, in stages that are full too where all blocks have one;
// where they do not, an edge each, or as many as one round over the device takes if a block takes several at once. One stage
// each where weights are streamed, so that all blocks are at work in the same small region of memory.
inline eq_work_split split_batch(int64_t edges, const Blocks& blocks) {
  const int64_t even = ceil_div(edges, blocks.count), most = blocks.edges_held;
  const int64_t fewest = blocks.take_all_at_once() ? std::clamp<int64_t>(even, 1, most) : 1;
  const int64_t held = edges < blocks.count * most ? fewest : most;
  if (blocks.streams_weights) return equal_split(held);
  const int64_t quarter = std::clamp<int64_t>(even / 4, 1, 64);
  return equal_split(std::max((quarter + held / 2) / held, int64_t{1}) * held);
}

// Whether blocks that have a row each would leave much of a device without work, at once or in a second round.
inline bool leaves_idle(const SlotsOfRows& graph, int64_t blocks, bool has_cheap_sums) {
  const int64_t rounds = ceil_div(graph.rows, blocks), places = rounds * blocks, idle = places - graph.rows;
  return has_cheap_sums ? rounds <= most_rounds && idle_part_cheap * idle > places
                        : rounds == 1 && idle_part * idle > places;
}

// A row to a block where that gives work to all of the device; a row that would keep its block busy for longer than all
// others is cut. Fewer rows are dealt out in equal parts, sooner where partial sums cost little beside all else.
inline eq_work_split split_by_rows(const SlotsOfRows& graph, int64_t blocks, bool has_cheap_sums = false,
                                   int64_t fewest_slots = least_slots) {
  const int64_t even = ceil_div(graph.slots, blocks), mean = graph.mean();
  if (leaves_idle(graph, blocks, has_cheap_sums)) return equal_split(std::max(even, fewest_slots));
  const auto cut = static_cast<int32_t>(std::max({even, longest_row * mean / 4, least_slots}));
  return {0, 0, 0, cut, cut, nullptr};
}

// Forward and double backward, which add up the edges of a row. Rows that do not fill the stages of a block are taken
// together, in double backward, which has more to set up for a block, those of twice the length too. Partial sums cost
// little in double backward, and forward if an edge has more weights than a row has outputs (`is_dense`).
inline eq_work_split split_with_sums(const SlotsOfRows& graph, const Blocks& blocks, Direction direction,
                                     bool is_dense) {
  const bool has_cheap_sums = is_dense || direction != Direction::forward;
  eq_work_split split = split_by_rows(graph, blocks.count, has_cheap_sums, blocks.fewest_slots());
  const int64_t full = blocks.edges_held * (direction == Direction::forward ? short_row : short_row_double) / 4;
  if (split.size > 0 || graph.slots > full * graph.rows) return split;
  split.size = static_cast<int32_t>(stages_of_short_rows * blocks.edges_held);
  split.longest = split.cut = static_cast<int32_t>(ceil_div(split.cut, split.size) * split.size);
  return split;
}

// Backward, which leaves nothing behind for a row; `together` slots are launched at a time. Long rows are dealt out in
// equal parts: small ones, so that all blocks are in the same region of memory, in whole rounds over the device; of one
// stage where weights are streamed. So are short rows whose blocks would begin too often: those of which two have room in
// the stages of a block or, where a multiprocessor has few blocks to work meanwhile (`resident`), those that leave room.
inline eq_work_split split_without_sums(const SlotsOfRows& graph, const Blocks& blocks, int64_t resident,
                                        int64_t together) {
  if (blocks.streams_weights) return equal_split(blocks.edges_held);
  const int64_t mean = graph.mean();
  const int64_t most_held = resident <= few_resident ? mean : 2 * mean - 1;
  if (together == graph.slots && mean <= least_slots && blocks.edges_held <= most_held)
    return split_by_rows(graph, blocks.count);
  const int64_t even = ceil_div(together, blocks.count);
  const int64_t wanted = std::max(least_slots, stages_of_equal_parts * blocks.edges_held);
  const int64_t rounds = std::max<int64_t>((even + wanted / 2) / wanted, 1);
  return equal_split(std::max(ceil_div(even, rounds), least_slots / 2));
}

}  // namespace eqaccel

// GPU prelude: which slots and rows belong to a block.
#pragma once
#include "abi.h"
#include "machine.h"

namespace {

// Where the first of values[low], ..., values[high - 1] stands that is not below a limit, or else `high`. They ascend; a
// whole warp searches.
EQ_FN int search(const int32_t* values, int low, int high, int limit) {
  while (low < high) {
    const int step = (high - low + 31) / 32, probe = low + (threadIdx.x % 32 + 1) * step - 1;
    low += step * __popc(ballot(probe < high && values[probe] < limit));
    high = min(high, low + step - 1);
  }
  return low;
}

// The slots of rows one after another: row n has slots first[n] to first[n + 1], or slot n alone where `first` is null.
struct Rows {
  const int32_t* first;
  int count, slots;

  EQ_FN int begin(int row) const { return first ? first[row] : row; }
  EQ_FN int end(int row) const { return first ? first[row + 1] : row + 1; }

  // The row that a slot belongs to.
  EQ_FN int of(int slot) const { return first ? search(first, 0, count, slot + 1) - 1 : slot; }
  // The same where some row is known to be that one or before it; the next are looked at first.
  EQ_FN int of(int slot, int some_row) const {
    if (!first) return slot;
    const int near = min(some_row + 32, count), found = search(first, some_row, near, slot + 1);
    return (found < near ? found : search(first, near, count, slot + 1)) - 1;
  }
};

// A graph may have room for more edges than it has: slots after those of the last row belong to nobody.
EQ_FN Rows rows_of(const int32_t* first, int64_t count, int64_t slots) {
  return {first, int(count), first ? first[count] : int(slots)};
}
EQ_FN Rows receivers_of(const eq_operands& o) { return rows_of(o.row_ptr, o.num_receivers, o.num_edges); }
EQ_FN Rows senders_of(const eq_operands& o) { return rows_of(o.t_row_ptr, o.num_senders, o.num_edges); }

// The slots of a block among those between two: first to last, and the row of the first one.
struct BlockRange {
  Rows rows;
  int first, last, row;
  bool exists;

  // `sums`: whether slots are added up. Rows without slots, whose sums are zero, then belong to the block that comes next.
  EQ_FN BlockRange(const Rows& rows_, const eq_work_split& split, int block, int from, int to, bool sums)
      : rows(rows_) {
    if (split.size > 0) part(split, from + int64_t(block) * split.size, from, min(to, rows.slots), sums);
    else part_of_row(split, block);
  }

  EQ_FN void part(const eq_work_split& split, int64_t begin, int from, int to, bool sums) {
    exists = begin < to;
    if (!exists) return;
    first = int(begin);
    last = int(min(begin + split.size, int64_t(to)));
    row = rows.of(first);
    if (split.longest > 0) {
      first = max(from, boundary(split, row, first));
      if (last < to) last = max(from, boundary(split, rows.of(last, row), last));
    }
    while (sums && row > 0 && rows.begin(row) == first && rows.begin(row - 1) == first) --row;
    exists = first < last;
  }
  // Where a range begins that would begin at a slot of some row.
  EQ_FN int boundary(const eq_work_split& split, int of_row, int slot) const {
    const int begin = rows.begin(of_row), length = rows.end(of_row) - begin;
    return length > split.longest ? max(begin, slot / split.cut * split.cut) : begin;
  }

  // A block for what follows each cut comes before those of rows: it has much to do if anything.
  EQ_FN void part_of_row(const eq_work_split& split, int block) {
    const int cuts = (rows.slots - 1) / split.cut, begin_of_part = (block + 1) * split.cut;
    const bool has_begin = block >= cuts;
    row = has_begin ? block - cuts : rows.of(begin_of_part);
    exists = row < rows.count;  // there are blocks for all cuts that a graph has room for
    if (!exists) return;
    const int begin = rows.begin(row), end = rows.end(row);
    const bool is_cut = end - begin > split.longest;
    first = has_begin ? begin : begin_of_part;
    last = is_cut ? min(end, (first / split.cut + 1) * split.cut) : end;
    exists = has_begin || (is_cut && first > begin);
  }

  // Where the sum over this range's slots of a row belongs: to the row itself or, if it was cut, to one of its partial sums.
  EQ_FN T* target(const eq_work_split& split, T* out, int of_row, int64_t dim) const {
    const bool has_begin = rows.begin(of_row) >= first;
    if (has_begin && rows.end(of_row) <= last) return out + of_row * dim;
    const int partial = has_begin ? 2 * (last / split.cut) + 1 : 2 * (first / split.cut);
    return static_cast<T*>(split.partials) + partial * dim;
  }
};

// Adds `count` values to a first one, in order; `load(n)` gives the n-th, and some are on their way at a time.
template <class V, class Load>
EQ_FN V add_up(V total, int count, const Load& load) {
  constexpr int ahead = 8;
  for (int n = 0; n < count; n += ahead) {
    V next[ahead];
#pragma unroll
    for (int k = 0; k < ahead; ++k) next[k] = n + k < count ? load(n + k) : V{};
#pragma unroll
    for (int k = 0; k < ahead; ++k) total = total + next[k];
  }
  return total;
}

// Adds up the partial sums of every row that was cut, in order, and clears the rows that no block has because they have no
// slots and come after the last one; `position(n)` is where element n is put. A block looks at some rows, all at once.
template <class Position>
EQ_FN void add_partials(const Rows& rows, const eq_work_split& split, T* out, int dim, Position position) {
  const auto first_cut = [&](int row) { return rows.begin(row) / split.cut + 1; };
  const auto is_cut = [&](int row) {
    return rows.end(row) - rows.begin(row) > split.longest && int64_t(first_cut(row)) * split.cut < rows.end(row);
  };
  const auto is_left = [&](int row) { return split.size > 0 && rows.begin(row) == rows.slots; };
  const int each = (rows.count + gridDim.x - 1) / gridDim.x;
  const int begin = blockIdx.x * each, end = min(begin + each, rows.count);
  bool any = false;
  for (int row = begin + threadIdx.x; row < end; row += blockDim.x) any = any || is_cut(row) || is_left(row);
  any = __syncthreads_or(any);
  wait_for_previous();
  if (!any) return;
  for (int row = begin; row < end; ++row) {
    const bool has_partials = is_cut(row);
    if (!has_partials && !is_left(row)) continue;
    const int row_end = rows.end(row), first = has_partials ? first_cut(row) * split.cut : row_end;
    for (int n = blockIdx.y * blockDim.x + threadIdx.x; n < dim; n += gridDim.y * blockDim.x) {
      const T* partial = static_cast<const T*>(split.partials) + 2 * int64_t(first_cut(row)) * dim + n;
      const int count = (row_end - first + split.cut - 1) / split.cut;
      const auto load = [&](int number) { return partial[number * int64_t(2 * dim)]; };
      out[int64_t(row) * dim + position(n)] = add_up(has_partials ? partial[dim] : T(0), count, load);
    }
  }
}

}  // namespace

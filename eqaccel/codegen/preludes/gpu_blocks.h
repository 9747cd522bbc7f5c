// GPU prelude: a lane's channels in the blocks of rows like x and z, in the layout that the kernels are made for.
//
// In the layout (mul, 2l+1) the elements of a lane's channels follow each other: it reads them as they stand, from shared
// memory without conflicts, since an odd number of elements lies between two lanes. To write them the lanes of a warp
// change elements in shared memory, some lanes at a time, so that what they store together lies together.
#pragma once
#include "direction.h"
#include "gpu_lane.h"
#include "machine.h"
#include "warp_machine.h"

namespace {

#ifdef EQ_IR_MUL
constexpr bool mul_ir = false;
#else
constexpr bool mul_ir = true;  // blocks are laid out (mul, 2l+1), not (2l+1, mul)
#endif

#ifdef EQ_BY_ROWS
constexpr bool by_rows = true;  // without a graph
#else
constexpr bool by_rows = false;
#endif

// A block of z in a segment: d components, of which the first is component `first` of the segment.
template <int offset_, int first_, int d_>
struct ZBlock {
  static constexpr int offset = offset_, first = first_, d = d_;
};
// The same of component number `row` of a block.
struct ZRow {
  int offset, row, d;
};

// Channels of this thread inside the blocks of a segment.
template <class S>
struct Channels {
  static constexpr int n = S::lane_channels, of_warp = 32 * n;
  typedef LaneOf<n> Values;
  int lane, first;
  bool active;  // false past the last channel
  EQ_FN Channels(int warp_of_segment, int lane_)
      : lane(lane_), first(warp_of_segment * of_warp + lane * n), active(S::mul % of_warp == 0 || first < S::mul) {}

  // The components of a block of a row.
  template <int d>
  EQ_FN void read(const T* row, int offset, Values* components) const {
    // Compilers keep what follows from `first` for each d in registers, which some kernels have none of.
    const T* const from = row + (!mul_ir ? first : computed_again(first) * d);
    Values elements[d];
#pragma unroll
    for (int q = 0; q < d; ++q) elements[q] = load<n>(from + (offset + q * (mul_ir ? n : S::mul)), active);
#pragma unroll
    for (int i = 0; i < d; ++i)
#pragma unroll
      for (int u = 0; u < n; ++u)
        components[i].v[u] = mul_ir ? elements[(u * d + i) / n].v[(u * d + i) % n] : elements[i].v[u];
  }
  // Runs on where to store what in a block of a row. A warp that has room changes elements among its lanes before.
  template <int d, class Store>
  EQ_FN void write(T* row, int offset, const Values* components, T* turned, const Store& store) const {
    constexpr int lanes = lanes_of(d);
    if constexpr (!mul_ir || d == 1) {
      write_components<d>(row, offset, components, store);
    } else if constexpr (lanes == 0) {
      Values elements[d];
      to_elements<d>(components, elements);
      T* const to = row + first * d;
      if (!active) return;
#pragma unroll
      for (int q = 0; q < d; ++q) store(to + (offset + q * n), elements[q]);
    } else {
      constexpr int part = lanes * n * d;
      T* const to = row + in_part(d);
#pragma unroll 1
      for (int begin = 0; begin < 32; begin += lanes) {
        meet_lanes();
        if (lanes == 32 || lane / lanes == begin / lanes) lay<d>(components, turned, lane - begin);
        meet_lanes();
#pragma unroll
        for (int at = 0; at < part; at += of_warp) {
          const bool in_part = at + of_warp <= part || at + lane * n < part;
          if (in_part && has(begin * n * d + at, d))
            store(to + (offset + begin * n * d + at), load<n>(turned + at + lane * n, true));
        }
      }
    }
  }
  // The same for a row whose blocks are laid out (2l+1, mul).
  template <int d, class Store>
  EQ_FN void write_components(T* row, int offset, const Values* components, const Store& store) const {
    T* const to = row + first;
    if (!active) return;
#pragma unroll
    for (int i = 0; i < d; ++i) store(to + (offset + i * S::mul), components[i]);
  }
  // Puts components of a block into shared memory in the order of the layout, as those of a lane of some. Row q of what
  // all lanes have put there, 32 times n elements, belongs where `place` says.
  template <int d>
  EQ_FN void lay(const Values* components, T* to, int lane) const {
    Values elements[d];
    to_elements<d>(components, elements);
#pragma unroll
    for (int q = 0; q < d; ++q)
      *reinterpret_cast<Values*>(to + (mul_ir ? lane * n * d + q * n : q * of_warp + lane * n)) = elements[q];
  }
  EQ_FN int place(int q, int d) const { return mul_ir ? in_part(d) + q * of_warp : first + q * S::mul; }
  EQ_FN bool has_row(int q, int d) const { return mul_ir ? has(q * of_warp, d) : active; }

 private:
  // A lane's components of a block, as they stand in the layout.
  template <int d>
  static EQ_FN void to_elements(const Values* components, Values* elements) {
#pragma unroll
    for (int i = 0; i < d; ++i)
#pragma unroll
      for (int u = 0; u < n; ++u) {
        if (mul_ir) elements[(u * d + i) / n].v[(u * d + i) % n] = components[i].v[u];
        else elements[i].v[u] = components[i].v[u];
      }
  }
  // Lanes that there is room for together; few of them would take too many turns.
  static EQ_FN constexpr int lanes_of(int d) { return 32 * n * d <= S::room ? 32 : 16 * n * d <= S::room ? 16 : 0; }
  // Of a warp's part of a block, in the layout (mul, 2l+1): where its element `lane * n` is in the block, and whether the
  // one that is `at` elements behind that belongs to a channel.
  EQ_FN int in_part(int d) const { return (first - lane * n) * d + lane * n; }
  EQ_FN bool has(int at, int d) const { return S::mul % of_warp == 0 || in_part(d) + at < S::mul * d; }
};

}  // namespace

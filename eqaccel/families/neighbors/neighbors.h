// Which pairs of atoms are within the cutoff now, of candidates that were found for a larger one; which edges are the
// reverse of each other, and rows that they share; and the forces that gradients of the vectors between pairs make.
//
// Candidates are in the order (receiver, sender, shift), and each has its reverse among them: the same pair seen from the
// other atom, with the opposite vector to the last bit. So an atom sends to as many edges as it receives from, and both
// orders of a packed index have the same row_ptr. That is not so where atoms have edges from nodes that receive nothing,
// ghosts of other ranks: these edges are alone. A warp looks at the candidates of one atom.
#pragma once
#include "machine.h"

namespace {

constexpr int warp = 32;

struct Atoms {
  const double *positions, *cells;
  const int32_t* structure;  // of each atom; null where there is one
  int count;
  double square;  // of the cutoff

  // From sender to receiver, periodic shifts included; whether it is within the cutoff.
  EQ_FN bool vector(int receiver, int sender, const int32_t* shift, double (&v)[3]) const {
    const double* cell = cells + 9 * (structure ? structure[receiver] : 0);
    double sum = 0;
#pragma unroll
    for (int c = 0; c < 3; ++c) {
      const double image = shift[0] * cell[c] + shift[1] * cell[3 + c] + shift[2] * cell[6 + c];
      v[c] = positions[3 * receiver + c] - positions[3 * sender + c] - image;
      sum += v[c] * v[c];
    }
    return sum < square;
  }
};

struct Lane {
  int number, atom;
  bool exists;

  EQ_FN explicit Lane(int atoms)
      : number(threadIdx.x % warp), atom((blockIdx.x * blockDim.x + threadIdx.x) / warp), exists(atom < atoms) {}
  // Lanes before this one for which a condition holds, of those of all lanes.
  EQ_FN int before(unsigned lanes) const { return __popc(lanes & ((1u << number) - 1)); }
};

// How many candidates of each atom are within the cutoff.
EQ_FN void count_edges(const Atoms& atoms, const int32_t* ptr, const int32_t* sender, const int32_t* shift,
                       int32_t* counts) {
  const Lane lane(atoms.count);
  if (!lane.exists) return;
  int found = 0;
  for (int first = ptr[lane.atom], last = ptr[lane.atom + 1]; first < last; first += warp) {
    const int k = first + lane.number;
    double v[3];
    found += __popc(ballot(k < last && atoms.vector(lane.atom, sender[k], shift + 3 * k, v)));
  }
  if (lane.number == 0) counts[lane.atom] = found;
}

struct Edges {
  const int32_t* ends;  // of the edges of each atom
  int nodes;  // the atoms, and nodes behind them for edges beyond the last
  int capacity;
  T* vectors;  // (capacity, 3)
  int64_t *senders, *receivers;
  int32_t *row_ptr, *edge, *slot_sender, *t_row_ptr, *t_slot;  // of the packed index

  EQ_FN int begin(int atom) const { return atom > 0 ? ends[atom - 1] : 0; }
};

// The parts of an index of a packed graph, see csrc/torch/packed_index.h.
EQ_FN Edges edges_of(const int32_t* ends, int nodes, int capacity, T* vectors, int64_t* edge_index, int32_t* packed) {
  int32_t *row_ptr = packed + 2, *edge = row_ptr + nodes + 1, *sender = edge + capacity, *t_row_ptr = sender + capacity;
  return {ends,    nodes, capacity, vectors,   edge_index,           edge_index + capacity,
          row_ptr, edge,  sender,   t_row_ptr, t_row_ptr + nodes + 1};
}

// Writes the edges in order. Those beyond the last belong to no row, and are between the nodes behind the atoms: whatever
// is computed for them, and whoever adds it up, no atom has a part in it. Their vectors are beyond the cutoff.
EQ_FN void write_edges(const Atoms& atoms, const int32_t* ptr, const int32_t* sender, const int32_t* shift,
                       const Edges& to, int32_t* slot_of) {
  const Lane lane(atoms.count);
  if (lane.exists) {
    int slot = to.begin(lane.atom);
    if (lane.number == 0) {
      if (lane.atom == 0) {
        to.row_ptr[-2] = to.row_ptr[-1] = to.nodes;
        to.row_ptr[0] = to.t_row_ptr[0] = 0;
      }
      to.row_ptr[lane.atom + 1] = to.t_row_ptr[lane.atom + 1] = min(to.ends[lane.atom], to.capacity);
    }
    for (int first = ptr[lane.atom], last = ptr[lane.atom + 1]; first < last; first += warp) {
      const int k = first + lane.number;
      double v[3];
      const bool near = k < last && atoms.vector(lane.atom, sender[k], shift + 3 * k, v);
      const unsigned lanes = ballot(near);
      const int mine = slot + lane.before(lanes);
      const bool fits = near && mine < to.capacity;
      if (k < last) slot_of[k] = fits ? mine : -1;
      if (fits) {
#pragma unroll
        for (int c = 0; c < 3; ++c) to.vectors[3 * int64_t(mine) + c] = T(v[c]);
        to.edge[mine] = mine;
        to.senders[mine] = to.slot_sender[mine] = sender[k];
        to.receivers[mine] = lane.atom;
      }
      slot += __popc(lanes);
    }
  }
  const double beyond = 2 * sqrt(atoms.square);
  const int64_t thread = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, threads = int64_t(gridDim.x) * blockDim.x;
  const int found = to.ends[atoms.count - 1], spare = to.nodes - atoms.count;
  for (int64_t node = atoms.count + thread; node < to.nodes; node += threads)
    to.row_ptr[node + 1] = to.t_row_ptr[node + 1] = min(found, to.capacity);
  for (int64_t e = found + thread; e < to.capacity; e += threads) {
#pragma unroll
    for (int c = 0; c < 3; ++c) to.vectors[3 * e + c] = c == 0 ? T(beyond) : T(0);
    to.edge[e] = int32_t(e);
    to.t_slot[e] = int32_t(e);
    to.senders[e] = to.receivers[e] = to.slot_sender[e] = atoms.count + int32_t(e % spare);
  }
}

// The slots of each sender, in order.
EQ_FN void order_by_sender(int atoms, const int32_t* t_ptr, const int32_t* t_candidate, const int32_t* slot_of,
                           const Edges& to) {
  const Lane lane(atoms);
  if (!lane.exists) return;
  int place = to.begin(lane.atom);
  for (int first = t_ptr[lane.atom], last = t_ptr[lane.atom + 1]; first < last; first += warp) {
    const int k = first + lane.number, slot = k < last ? slot_of[t_candidate[k]] : -1;
    const unsigned lanes = ballot(slot >= 0);
    const int mine = place + lane.before(lanes);
    if (slot >= 0 && mine < to.capacity) to.t_slot[mine] = slot;
    place += __popc(lanes);
  }
}

// Edges and their reverses, of a graph in which slots are edges. A row of a pair has the edge that comes first, and the
// other one, or -1 where the edge is alone.
struct Pairs {
  const int32_t *row_ptr, *sender, *t_row_ptr, *t_slot;  // of the packed index
  const int32_t* ends;  // of the pairs of each atom, which are those of its edges that come first
  int capacity;  // room for edges
  int32_t* row;  // (capacity), the pair of an edge
  int2* edges;  // (room)
  int room;
  bool all_reversible;  // if not, edges from nodes that receive nothing are alone

  EQ_FN bool is_alone(int slot) const {
    const int from = sender[slot];
    return row_ptr[from] == row_ptr[from + 1];
  }

  // The reverse of an edge, or nothing that is an edge where not all edges found room. Edges from one atom to another are
  // in the order of shifts, which those that lead back have the other way round. In the order of senders these are where
  // the former are in that of receivers, of which those that are alone are left out: `back` from there.
  EQ_FN int reverse_of(int slot, int begin, int end, int back) const {
    const int from = sender[slot];
    int first = slot, last = slot;
    while (first > begin && sender[first - 1] == from) --first;
    while (last + 1 < end && sender[last + 1] == from) ++last;
    return t_slot[min(first + last - slot - back, capacity - 1)];
  }

  // Calls back with the edges of an atom that come first: the lane's own, its reverse or -1, and how many came before it.
  template <class Call>
  EQ_FN int each(const Lane& lane, const Call& call) const {
    const int begin = row_ptr[lane.atom], end = row_ptr[lane.atom + 1];
    int found = 0, back = begin - t_row_ptr[lane.atom];
    for (int first = begin; first < end; first += warp) {
      const int slot = first + lane.number;
      const bool alone = !all_reversible && slot < end && is_alone(slot);
      const unsigned lone = all_reversible ? 0 : ballot(alone);
      const int reverse = slot < end && !alone ? reverse_of(slot, begin, end, back + lane.before(lone)) : -1;
      const bool comes_first = alone || (slot < reverse && reverse < capacity);
      const unsigned lanes = ballot(comes_first);
      if (comes_first) call(slot, reverse, found + lane.before(lanes));
      found += __popc(lanes);
      back += __popc(lone);
    }
    return found;
  }
};

EQ_FN Pairs pairs_of(int nodes, int capacity, const int32_t* packed, bool all_reversible, const int32_t* ends,
                     int32_t* row, int2* edges, int room) {
  const int32_t *row_ptr = packed + 2, *sender = row_ptr + nodes + 1 + capacity, *t_row_ptr = sender + capacity;
  return {row_ptr, sender, t_row_ptr, t_row_ptr + nodes + 1, ends, capacity, row, edges, room, all_reversible};
}

EQ_FN void count_pairs(int atoms, const Pairs& pairs, int32_t* counts) {
  const Lane lane(atoms);
  if (!lane.exists) return;
  const int found = pairs.each(lane, [](int, int, int) {});
  if (lane.number == 0) counts[lane.atom] = found;
}

// Rows beyond the last pair have an edge, and -2 in place of another one. No rows of pairs were seen to differ yet.
EQ_FN void write_pairs(int atoms, const Pairs& pairs, double* differ) {
  const Lane lane(atoms);
  if (blockIdx.x == 0 && threadIdx.x == 0) *differ = 0;
  if (lane.exists) {
    const int begin = lane.atom > 0 ? pairs.ends[lane.atom - 1] : 0;
    pairs.each(lane, [&](int slot, int reverse, int number) {
      if (begin + number >= pairs.room) return;
      pairs.row[slot] = begin + number;
      if (reverse >= 0) pairs.row[reverse] = begin + number;
      pairs.edges[begin + number] = make_int2(slot, reverse);
    });
  }
  const int64_t thread = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, threads = int64_t(gridDim.x) * blockDim.x;
  for (int64_t n = pairs.ends[atoms - 1] + thread; n < pairs.room; n += threads) pairs.edges[n] = make_int2(int(n), -2);
}

// Sums of two rows of a matrix, or the first of them where there is no second one; zeros beyond the last pair.
EQ_FN void add_pairs(const T* matrix, const int2* edges, int rows, int columns, T* sums) {
  const Lane row(rows);
  if (!row.exists) return;
  const int2 of = edges[row.atom];
  const T *first = matrix + of.x * int64_t(columns), *second = matrix + of.y * int64_t(columns);
  for (int column = row.number; column < columns; column += warp) {
    T sum = of.y > -2 ? first[column] : T(0);
    if (of.y >= 0) sum += second[column];
    sums[row.atom * int64_t(columns) + column] = sum;
  }
}

constexpr int quad = 4;
struct alignas(quad * sizeof(T)) Quad {
  T v[quad];

  EQ_FN Quad operator+(const Quad& other) const {
    Quad sum = *this;
#pragma unroll
    for (int u = 0; u < quad; ++u) sum.v[u] += other.v[u];
    return sum;
  }
};

// The same for a matrix that comes in portions, one launch after another: of the edges from `first` to `last`. An edge adds
// its row to that of the other one if this was in an earlier portion; where both are in this one, the second does. Rows
// are of whole quads, of which a thread has one.
EQ_FN void add_some_pairs(const Quad* matrix, const int32_t* row, const int2* edges, int first, int last, int rows,
                          int quads, Quad* sums) {
  const int64_t thread = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const int edge = first + int(thread / quads), column = int(thread % quads);
  if (edge < rows && edges[edge].y == -2) sums[edge * int64_t(quads) + column] = Quad{};  // beyond the last pair
  if (edge >= last) return;
  const int pair = row[edge];
  const int2 of = edges[pair];
  const bool is_first = of.x == edge;
  if (of.y == -2 || !(is_first || of.y == edge)) return;  // there is room for an edge here, and none
  const int other = is_first ? of.y : of.x;
  const bool together = other >= first && other < last;
  if (together && is_first) return;
  const auto at = [&](int e) { return matrix[(e - first) * int64_t(quads) + column]; };
  Quad& sum = sums[pair * int64_t(quads) + column];
  sum = together ? at(other) + at(edge) : other >= 0 && other < first ? sum + at(edge) : at(edge);
}

// An element of a matrix for each thread.
struct Element {
  int64_t place;
  int row, column;
  bool exists;

  EQ_FN Element(int rows, int columns) : place(int64_t(blockIdx.x) * blockDim.x + threadIdx.x) {
    exists = place < rows * int64_t(columns);
    row = exists ? int(place / columns) : 0;
    column = int(place - row * int64_t(columns));
  }
};

// Rows of values of edges, once a pair: those of the edge that comes first. Says where the other one's are not the same;
// NaN is the same as NaN.
EQ_FN void take_pairs(const T* values, const int2* edges, int rows, int columns, T* taken, double* differ) {
  const Element element(rows, columns);
  if (!element.exists) return;
  const int2 of = edges[element.row];
  const T value = values[of.x * int64_t(columns) + element.column];
  taken[element.place] = value;
  if (of.y < 0) return;
  const T other = values[of.y * int64_t(columns) + element.column];
  if (value != other && (value == value || other == other)) *differ = 1;
}

// The transpose of that: rows of pairs for the edges that come first, and zeros for the others.
EQ_FN void spread_pairs(const T* taken, const int32_t* row, const int2* edges, int count, int columns, T* values) {
  const Element element(count, columns);
  if (!element.exists) return;
  const int pair = row[element.row];
  const int2 of = edges[pair];
  const bool comes_first = of.x == element.row && of.y > -2;
  values[element.place] = comes_first ? taken[pair * int64_t(columns) + element.column] : T(0);
}

// With g the gradient of the energy in the vectors v of edges: an atom that receives has -g, one that sends has g. Virials
// are sums of the products v g over the edges that an atom receives. Lanes take every 32nd edge, and are added in pairs.
EQ_FN void add_forces(int atoms, const T* vectors, const T* gradient, const int32_t* row_ptr, const int32_t* t_row_ptr,
                      const int32_t* t_slot, double* forces, double* virials) {
  const Lane lane(atoms);
  if (!lane.exists) return;
  double sums[12] = {};
  for (int e = row_ptr[lane.atom] + lane.number; e < row_ptr[lane.atom + 1]; e += warp)
#pragma unroll
    for (int c = 0; c < 3; ++c) {
      const double g = gradient[3 * int64_t(e) + c];
      sums[c] -= g;
#pragma unroll
      for (int d = 0; d < 3; ++d) sums[3 + 3 * d + c] += vectors[3 * int64_t(e) + d] * g;
    }
  for (int t = t_row_ptr[lane.atom] + lane.number; t < t_row_ptr[lane.atom + 1]; t += warp)
#pragma unroll
    for (int c = 0; c < 3; ++c) sums[c] += gradient[3 * int64_t(t_slot[t]) + c];
#pragma unroll
  for (int n = 0; n < 12; ++n)
    for (int mask = warp / 2; mask > 0; mask /= 2) sums[n] += shuffle_xor(sums[n], mask);
  if (lane.number > 0) return;
#pragma unroll
  for (int c = 0; c < 3; ++c) forces[3 * lane.atom + c] = sums[c];
#pragma unroll
  for (int n = 0; n < 9; ++n) virials[9 * lane.atom + n] = sums[3 + n];
}

}  // namespace

// csrc/runtime/neighbors.cpp launches these.
#define EQ_EXPORT_NEIGHBORS                                                                                            \
  EQ_KERNEL void eq_count_edges(const double* positions, const double* cells, const int32_t* structure, int atoms,     \
                                double square, const int32_t* ptr, const int32_t* sender, const int32_t* shift,        \
                                int32_t* counts) {                                                                     \
    count_edges(Atoms{positions, cells, structure, atoms, square}, ptr, sender, shift, counts);                        \
  }                                                                                                                    \
  EQ_KERNEL void eq_write_edges(const double* positions, const double* cells, const int32_t* structure, int atoms,     \
                                double square, const int32_t* ptr, const int32_t* sender, const int32_t* shift,        \
                                const int32_t* ends, int nodes, int capacity, T* vectors, int64_t* edge_index,         \
                                int32_t* packed, int32_t* slot_of) {                                                   \
    write_edges(Atoms{positions, cells, structure, atoms, square}, ptr, sender, shift,                                 \
                edges_of(ends, nodes, capacity, vectors, edge_index, packed), slot_of);                                \
  }                                                                                                                    \
  EQ_KERNEL void eq_order_by_sender(int atoms, const int32_t* t_ptr, const int32_t* t_candidate,                       \
                                    const int32_t* slot_of, const int32_t* ends, int nodes, int capacity,              \
                                    int32_t* packed) {                                                                 \
    order_by_sender(atoms, t_ptr, t_candidate, slot_of, edges_of(ends, nodes, capacity, nullptr, nullptr, packed));    \
  }                                                                                                                    \
  EQ_KERNEL void eq_count_pairs(int atoms, int nodes, int capacity, const int32_t* packed, bool all_reversible,        \
                                int32_t* counts) {                                                                     \
    count_pairs(atoms, pairs_of(nodes, capacity, packed, all_reversible, nullptr, nullptr, nullptr, 0), counts);       \
  }                                                                                                                    \
  EQ_KERNEL void eq_write_pairs(int atoms, int nodes, int capacity, const int32_t* packed, bool all_reversible,        \
                                const int32_t* ends, int32_t* row, int2* edges, int room, double* differ) {            \
    write_pairs(atoms, pairs_of(nodes, capacity, packed, all_reversible, ends, row, edges, room), differ);             \
  }                                                                                                                    \
  EQ_KERNEL void eq_take_pairs(const T* values, const int2* edges, int rows, int columns, T* taken, double* differ) {  \
    take_pairs(values, edges, rows, columns, taken, differ);                                                           \
  }                                                                                                                    \
  EQ_KERNEL void eq_spread_pairs(const T* taken, const int32_t* row, const int2* edges, int count, int columns,        \
                                 T* values) {                                                                          \
    spread_pairs(taken, row, edges, count, columns, values);                                                           \
  }                                                                                                                    \
  EQ_KERNEL void eq_add_pairs(const T* matrix, const int2* edges, int rows, int columns, T* sums) {                    \
    add_pairs(matrix, edges, rows, columns, sums);                                                                     \
  }                                                                                                                    \
  EQ_KERNEL void eq_add_some_pairs(const T* matrix, const int32_t* row, const int2* edges, int first, int last,        \
                                   int rows, int columns, T* sums) {                                                   \
    add_some_pairs(reinterpret_cast<const Quad*>(matrix), row, edges, first, last, rows, columns / quad,               \
                   reinterpret_cast<Quad*>(sums));                                                                     \
  }                                                                                                                    \
  EQ_KERNEL void eq_add_forces(int nodes, int capacity, const T* vectors, const T* gradient, const int32_t* packed,    \
                               double* forces, double* virials) {                                                      \
    const int32_t *row_ptr = packed + 2, *t_row_ptr = row_ptr + nodes + 1 + 2 * int64_t(capacity);                     \
    add_forces(nodes, vectors, gradient, row_ptr, t_row_ptr, t_row_ptr + nodes + 1, forces, virials);                  \
  }

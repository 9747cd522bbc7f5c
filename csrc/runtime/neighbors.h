// Neighbours within a cutoff, out of candidates, and pairs of edges, on a GPU; eqaccel/families/neighbors/neighbors.h
// says how.
#pragma once
#include <cstddef>
#include <cstdint>

#include "gpu_driver.h"
#include "program.h"

namespace eqaccel {

// Atoms, and the pairs that may be neighbours, in the order (receiver, sender, shift).
struct NeighborCandidates {
  const double *positions, *cells;  // (atoms, 3); (structures, 3, 3), a cell vector in each row
  const int32_t* structure;  // (atoms), or null where there is one structure
  const int32_t *ptr, *sender;  // (atoms + 1) first candidate of each receiver; (candidates)
  const int32_t* shift;  // (candidates, 3) cell vectors between the two atoms
  const int32_t *t_ptr, *t_order;  // the candidates by sender, in order: (atoms + 1), (candidates)
  int64_t atoms;
  double cutoff;
};

// Room for edges; `packed` is laid out as csrc/torch/packed_index.h says.
struct NeighborEdges {
  int64_t nodes;  // the atoms, and at least one behind them
  int64_t capacity;
  void* vectors;  // (capacity, 3)
  int64_t* edge_index;  // (2, capacity)
  int32_t* packed;
  int32_t* slot_of;  // (candidates) scratch
};

// Room for pairs of edges.
struct PairRoom {
  int64_t rows;
  int32_t* row;  // (capacity of the edges) the pair of each
  int32_t* edges;  // (rows, 2), the second is -1 where an edge is alone
  double* differ;  // (1) whether values of pairs were seen to differ
};

class NeighborKernels {
 public:
  // Loaded at the first call for a program, a scalar and a device, then kept; thread-safe.
  static const NeighborKernels& get(const Program&, Backend, Scalar, int device);

  // All of these queue work on `stream`. Edges of each atom, (atoms); their sums, `ends`, are for the other one.
  void count(const NeighborCandidates&, int32_t* counts, void* stream) const;
  void write(const NeighborCandidates&, const int32_t* ends, const NeighborEdges&, void* stream) const;
  // The same for pairs of edges and their reverses, of a graph of atoms in which slots are edges; `row` comes with zeros,
  // and `differ` leaves with one. Unless all are reversible, edges from atoms that receive nothing are alone.
  void count_pairs(int64_t atoms, const NeighborEdges&, bool all_reversible, int32_t* counts, void* stream) const;
  void write_pairs(int64_t atoms, const NeighborEdges&, bool all_reversible, const int32_t* ends, const PairRoom&,
                   void* stream) const;
  // Rows (rows, columns) of the values of the edges of pairs that come first; sets `differ` to 1 where those of the others
  // are not the same. And the transpose, to values of `count` edges.
  void take_pairs(const void* values, const int32_t* edges, int64_t rows, int64_t columns, void* taken, double* differ,
                  void* stream) const;
  void spread_pairs(const void* taken, const int32_t* row, const int32_t* edges, int64_t count, int64_t columns,
                    void* values, void* stream) const;
  // Sums (rows, columns) of the rows of a matrix that pairs have.
  void add_pairs(const void* matrix, const int32_t* edges, int64_t rows, int64_t columns, void* sums,
                 void* stream) const;
  // The same of a matrix whose rows come in portions, each with edges that follow those of the one before, in multiples of
  // `quad` columns.
  static constexpr int64_t quad = 4;
  struct EdgePortion {
    int64_t first, last;
    bool is_last;
  };
  void add_pairs(const void* matrix, const EdgePortion&, const int32_t* row, const int32_t* edges, int64_t rows,
                 int64_t columns, void* sums, void* stream) const;
  // Forces (nodes, 3) and virials (nodes, 3, 3) of a gradient (capacity, 3).
  void add_forces(const NeighborEdges&, const void* gradient, double* forces, double* virials, void* stream) const;

 private:
  NeighborKernels(const Program&, Backend, Scalar, int device);
  // A warp for each row, or a thread for each element.
  void launch(GpuDriver::Function, int64_t rows, void* stream, void** parameters) const;
  void launch_elements(GpuDriver::Function, int64_t elements, void* stream, void** parameters) const;

  const GpuDriver& driver_;
  int device_;
  unsigned threads_;
  GpuDriver::Function count_ = nullptr, write_ = nullptr, order_ = nullptr, forces_ = nullptr;
  GpuDriver::Function count_pairs_ = nullptr, write_pairs_ = nullptr, add_pairs_ = nullptr, add_some_pairs_ = nullptr;
  GpuDriver::Function take_pairs_ = nullptr, spread_pairs_ = nullptr;
};

}  // namespace eqaccel

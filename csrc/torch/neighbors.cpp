// eqaccel::neighbors: the edges within a cutoff, of candidates that were found for a larger one, in the order of a packed
// index; eqaccel::neighbor_pairs, which of them are the reverse of each other; and eqaccel::edge_forces, what the
// gradient of an energy in the vectors of edges is for the atoms. None has a derivative: a simulation differentiates
// what lies between them.
#include "neighbors.h"

#include <ATen/Parallel.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <tuple>

#include "device.h"
#include "edge_pairs.h"
#include "operators.h"
#include "packed_index.h"

namespace eqaccel::ops {
namespace {
namespace neighbors_file {

using Edges = std::tuple<Tensor, Tensor, Tensor, Tensor>;  // vectors, edge_index, graph, num_edges
using Forces = std::tuple<Tensor, Tensor>;
constexpr const char *op_name = "eqaccel::neighbors", *forces_name = "eqaccel::edge_forces";

void check(const char* op, const char* name, const Tensor& t, at::ScalarType type, at::IntArrayRef shape,
           const Tensor& like) {
  TORCH_CHECK(t.scalar_type() == type && t.sizes() == shape && t.device() == like.device() && t.is_contiguous(), op,
              ": argument '", name, "' must be contiguous ", type, " of shape ", shape, " on ", like.device(), ", got ",
              t.scalar_type(), " of shape ", t.sizes(), " on ", t.device(), ". Pass the tensors of one system.");
}

// What is read is checked for its shape alone: indices are those of the candidates that eqaccel.step makes.
NeighborCandidates candidates(const Tensor& positions, const Tensor& cells, const Tensor& structure, const Tensor& ptr,
                              const Tensor& sender, const Tensor& shift, const Tensor& t_ptr, const Tensor& t_order,
                              double cutoff) {
  const int64_t atoms = positions.size(0), count = sender.numel();
  TORCH_CHECK(atoms > 0, op_name, ": argument 'positions' must have at least one row, got none.");
  TORCH_CHECK(count < std::numeric_limits<int32_t>::max() / 3, op_name,
              ": candidates must number less than 7.1e8, got ", count, ". Split the system.");
  check(op_name, "positions", positions, at::kDouble, {atoms, 3}, positions);
  check(op_name, "cells", cells, at::kDouble, {cells.size(0), 3, 3}, positions);
  if (cells.size(0) != 1) check(op_name, "structure", structure, at::kInt, {atoms}, positions);
  check(op_name, "ptr", ptr, at::kInt, {atoms + 1}, positions);
  check(op_name, "sender", sender, at::kInt, {count}, positions);
  check(op_name, "shift", shift, at::kInt, {count, 3}, positions);
  check(op_name, "t_ptr", t_ptr, at::kInt, {atoms + 1}, positions);
  check(op_name, "t_order", t_order, at::kInt, {count}, positions);
  return {positions.const_data_ptr<double>(),
          cells.const_data_ptr<double>(),
          cells.size(0) == 1 ? nullptr : structure.const_data_ptr<int32_t>(),
          ptr.const_data_ptr<int32_t>(),
          sender.const_data_ptr<int32_t>(),
          shift.const_data_ptr<int32_t>(),
          t_ptr.const_data_ptr<int32_t>(),
          t_order.const_data_ptr<int32_t>(),
          atoms,
          cutoff};
}

at::ScalarType checked(const char* op, at::ScalarType dtype) {
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kDouble, op, ": argument 'dtype' must be float32 or float64, got ",
              dtype, ".");
  return dtype;
}

struct Room {
  Tensor vectors, edge_index, packed;

  Room(const Tensor& positions, at::ScalarType dtype, int64_t nodes, int64_t capacity) {
    vectors = at::empty({capacity, 3}, positions.options().dtype(dtype));
    edge_index = at::empty({2, capacity}, positions.options().dtype(at::kLong));
    packed = at::empty({packed_length(nodes, nodes, capacity)}, positions.options().dtype(at::kInt));
  }
};

// The slots of each sender, in order, where it may have another number of them than it receives. Neither waits for the
// device nor forbids graph capture.
void order_by_sender(const Room& room, const Tensor& slot_of, const Tensor& t_ptr, const Tensor& t_order,
                     int64_t nodes) {
  const int64_t capacity = room.vectors.size(0), atoms = t_ptr.size(0) - 1;
  const auto parts = room.packed.split_with_sizes({2, nodes + 1, capacity, capacity, nodes + 1, capacity});
  // There may be room behind the last candidate.
  const Tensor there = at::arange(t_order.size(0), t_order.options()).lt(t_ptr.narrow(0, atoms, 1));
  const Tensor slots = slot_of.index_select(0, t_order);
  const auto [t_slot, before] = compacted(slots, slots.ge(0).logical_and(there), capacity);
  parts[4].narrow(0, 0, atoms + 1).copy_(before.index_select(0, t_ptr));
  parts[5].copy_(t_slot);
}

const NeighborKernels& kernels_of(const char* op, const Tensor& payload, int64_t key, c10::Device device,
                                  at::ScalarType dtype) {
  return translating_errors([&]() -> const NeighborKernels& {
    return NeighborKernels::get(*program_of(op, payload, key), backend_of(device), scalar_of(dtype), device.index());
  });
}

Edges on_gpu(const Tensor& payload, int64_t key, const Tensor& positions, const Tensor& cells, const Tensor& structure,
             const Tensor& ptr, const Tensor& sender, const Tensor& shift, const Tensor& t_ptr, const Tensor& t_order,
             double cutoff, int64_t spare, int64_t capacity, at::ScalarType dtype, bool all_reversible) {
  const NeighborCandidates from = candidates(positions, cells, structure, ptr, sender, shift, t_ptr, t_order, cutoff);
  TORCH_CHECK(capacity > 0 && capacity < std::numeric_limits<int32_t>::max() / 3, op_name,
              ": argument 'capacity' must be positive and below 7.1e8 on a GPU, got ", capacity, ".");
  TORCH_CHECK(spare > 0, op_name, ": argument 'spare' must be positive on a GPU, got ", spare, ".");
  const int64_t nodes = from.atoms + spare;
  const c10::DeviceGuard guard(positions.device());
  const auto integers = positions.options().dtype(at::kInt);
  Room room(positions, checked(op_name, dtype), nodes, capacity);
  const Tensor counts = at::empty({from.atoms}, integers), slot_of = at::empty({sender.numel()}, integers);
  const NeighborKernels& kernels = kernels_of(op_name, payload, key, positions.device(), dtype);
  void* const stream = current_stream(positions.device());
  kernels.count(from, counts.mutable_data_ptr<int32_t>(), stream);
  const Tensor ends = at::cumsum(counts, 0, at::kInt);
  kernels.write(from, ends.const_data_ptr<int32_t>(),
                {nodes, capacity, room.vectors.mutable_data_ptr(), room.edge_index.mutable_data_ptr<int64_t>(),
                 room.packed.mutable_data_ptr<int32_t>(), slot_of.mutable_data_ptr<int32_t>()},
                stream);
  if (!all_reversible) order_by_sender(room, slot_of, t_ptr, t_order, nodes);
  note_nodes(room.packed, nodes, nodes);
  return {room.vectors, room.edge_index, room.packed, ends.narrow(0, from.atoms - 1, 1)};
}

// The same sums in the same order as on a GPU.
bool vector_of(const NeighborCandidates& from, int64_t receiver, int64_t k, double (&v)[3]) {
  const double* cell = from.cells + 9 * (from.structure ? from.structure[receiver] : 0);
  const int32_t* shift = from.shift + 3 * k;
  double sum = 0;
  for (int c = 0; c < 3; ++c) {
    const double image = shift[0] * cell[c] + shift[1] * cell[3 + c] + shift[2] * cell[6 + c];
    v[c] = from.positions[3 * receiver + c] - from.positions[3 * from.sender[k] + c] - image;
    sum += v[c] * v[c];
  }
  return sum < from.cutoff * from.cutoff;
}

template <class T>
void write_edges(const NeighborCandidates& from, const Room& room, int32_t* slot_of, bool all_reversible) {
  const int64_t capacity = room.vectors.size(0);
  T* vectors = room.vectors.mutable_data_ptr<T>();
  int64_t* senders = room.edge_index.mutable_data_ptr<int64_t>();
  const auto [row_ptr, edge, slot_sender, t_row_ptr, t_slot] =
      PackedParts(room.packed.mutable_data_ptr<int32_t>(), {from.atoms, from.atoms, capacity});
  const auto each_atom = [&](const auto& work) {
    at::parallel_for(0, from.atoms, 64, [&](int64_t begin, int64_t end) {
      for (int64_t atom = begin; atom < end; ++atom) work(atom);
    });
  };
  each_atom([&, row_ptr = row_ptr, edge = edge, slot_sender = slot_sender](int64_t atom) {
    int32_t slot = row_ptr[atom];
    for (int32_t k = from.ptr[atom]; k < from.ptr[atom + 1]; ++k) {
      double v[3];
      const bool near = vector_of(from, atom, k, v);
      slot_of[k] = near ? slot : -1;
      if (!near) continue;
      for (int c = 0; c < 3; ++c) vectors[3 * static_cast<int64_t>(slot) + c] = static_cast<T>(v[c]);
      edge[slot] = slot;
      senders[slot] = slot_sender[slot] = from.sender[k];
      senders[capacity + slot] = atom;
      ++slot;
    }
  });
  if (!all_reversible) return;
  each_atom([&, row_ptr = row_ptr, t_slot = t_slot](int64_t atom) {
    int32_t place = row_ptr[atom];
    for (int32_t k = from.t_ptr[atom]; k < from.t_ptr[atom + 1]; ++k)
      if (const int32_t slot = slot_of[from.t_order[k]]; slot >= 0) t_slot[place++] = slot;
  });
  std::copy(row_ptr, row_ptr + from.atoms + 1, t_row_ptr);
}

Edges on_cpu(const Tensor&, int64_t, const Tensor& positions, const Tensor& cells, const Tensor& structure,
             const Tensor& ptr, const Tensor& sender, const Tensor& shift, const Tensor& t_ptr, const Tensor& t_order,
             double cutoff, int64_t, int64_t, at::ScalarType dtype, bool all_reversible) {
  const NeighborCandidates from = candidates(positions, cells, structure, ptr, sender, shift, t_ptr, t_order, cutoff);
  const auto integers = positions.options().dtype(at::kInt);
  const Tensor row_ptr = at::zeros({from.atoms + 1}, integers), slot_of = at::empty({sender.numel()}, integers);
  int32_t* const ends = row_ptr.mutable_data_ptr<int32_t>();
  at::parallel_for(0, from.atoms, 64, [&](int64_t begin, int64_t end) {
    double v[3];
    for (int64_t atom = begin; atom < end; ++atom)
      for (int32_t k = from.ptr[atom]; k < from.ptr[atom + 1]; ++k) ends[atom + 1] += vector_of(from, atom, k, v);
  });
  for (int64_t atom = 0; atom < from.atoms; ++atom) ends[atom + 1] += ends[atom];
  const int64_t count = ends[from.atoms];
  const Room room(positions, checked(op_name, dtype), from.atoms, count);
  int32_t* const packed = room.packed.mutable_data_ptr<int32_t>();
  packed[0] = packed[1] = static_cast<int32_t>(from.atoms);
  std::copy(ends, ends + from.atoms + 1, packed + 2);
  const auto write = dtype == at::kFloat ? write_edges<float> : write_edges<double>;
  write(from, room, slot_of.mutable_data_ptr<int32_t>(), all_reversible);
  if (!all_reversible) order_by_sender(room, slot_of, t_ptr, t_order, from.atoms);
  return {room.vectors, room.edge_index, room.packed, row_ptr.narrow(0, from.atoms, 1)};
}

std::tuple<Tensor, Tensor, Tensor> pairs_on_gpu(const Tensor& payload, int64_t key, const Tensor& vectors,
                                                const Tensor& graph, int64_t num_atoms, int64_t num_nodes,
                                                bool all_reversible) {
  constexpr const char* op = "eqaccel::neighbor_pairs";
  const int64_t capacity = vectors.size(0);
  TORCH_CHECK(0 < num_atoms && num_atoms <= num_nodes, op, ": expected 0 < num_atoms <= num_nodes, got ", num_atoms,
              " and ", num_nodes, ". Pass the numbers of one system.");
  check_packed(op, graph, {num_nodes, num_nodes, capacity});
  const c10::DeviceGuard guard(graph.device());
  const NeighborEdges edges{
      num_nodes, capacity, nullptr, nullptr, const_cast<int32_t*>(graph.const_data_ptr<int32_t>()), nullptr};
  const NeighborKernels& kernels = kernels_of(op, payload, key, graph.device(), checked(op, vectors.scalar_type()));
  void* const stream = current_stream(graph.device());
  const Tensor counts = at::empty({num_atoms}, graph.options()), row = at::zeros({capacity}, graph.options());
  const Tensor differ = at::empty({1}, graph.options().dtype(at::kDouble));
  kernels.count_pairs(num_atoms, edges, all_reversible, counts.mutable_data_ptr<int32_t>(), stream);
  const Tensor ends = at::cumsum(counts, 0, at::kInt);
  // How many edges are alone is known to the device, which is waited for.
  const int64_t room = all_reversible ? (capacity + 1) / 2 : ends.narrow(0, num_atoms - 1, 1).item<int32_t>();
  const Tensor members = at::empty({room, 2}, graph.options());
  kernels.write_pairs(
      num_atoms, edges, all_reversible, ends.const_data_ptr<int32_t>(),
      {room, row.mutable_data_ptr<int32_t>(), members.mutable_data_ptr<int32_t>(), differ.mutable_data_ptr<double>()},
      stream);
  return {row, members, differ};
}

Tensor take_pairs(const Tensor& payload, int64_t key, const Tensor& values, const Tensor& row, const Tensor& edges,
                  const Tensor& differ) {
  check_pairs("eqaccel::take_pairs", values, row.size(0), row, edges, differ);
  const c10::DeviceGuard guard(values.device());
  const Tensor held = values.contiguous(), taken = at::empty({edges.size(0), values.size(1)}, values.options());
  if (taken.numel() > 0)
    kernels_of("eqaccel::take_pairs", payload, key, values.device(), values.scalar_type())
        .take_pairs(held.const_data_ptr(), edges.const_data_ptr<int32_t>(), edges.size(0), values.size(1),
                    taken.mutable_data_ptr(), differ.mutable_data_ptr<double>(), current_stream(values.device()));
  return taken;
}

Tensor spread_pairs(const Tensor& payload, int64_t key, const Tensor& rows, const Tensor& row, const Tensor& edges) {
  check_pairs("eqaccel::spread_pairs", rows, edges.size(0), row, edges);
  const c10::DeviceGuard guard(rows.device());
  const Tensor held = rows.contiguous(), values = at::empty({row.size(0), rows.size(1)}, rows.options());
  if (edges.size(0) == 0) return values.zero_();  // there may be room for edges, and no pair to look at
  if (values.numel() > 0)
    kernels_of("eqaccel::spread_pairs", payload, key, rows.device(), rows.scalar_type())
        .spread_pairs(held.const_data_ptr(), row.const_data_ptr<int32_t>(), edges.const_data_ptr<int32_t>(),
                      row.size(0), rows.size(1), values.mutable_data_ptr(), current_stream(rows.device()));
  return values;
}

Tensor add_pairs(const Tensor& payload, int64_t key, const Tensor& matrix, const Tensor& edges) {
  constexpr const char* op = "eqaccel::add_pairs";
  TORCH_CHECK(matrix.dim() == 2, op, ": argument 'matrix' must have shape (num_edges, columns), got ", matrix.sizes(),
              ". Pass a row for each edge.");
  check(op, "matrix", matrix, checked(op, matrix.scalar_type()), matrix.sizes(), matrix);
  check(op, "edges", edges, at::kInt, {edges.size(0), 2}, matrix);
  const c10::DeviceGuard guard(matrix.device());
  const Tensor sums = at::empty({edges.size(0), matrix.size(1)}, matrix.options());
  if (sums.numel() == 0) return sums;
  kernels_of(op, payload, key, matrix.device(), matrix.scalar_type())
      .add_pairs(matrix.const_data_ptr(), edges.const_data_ptr<int32_t>(), edges.size(0), matrix.size(1),
                 sums.mutable_data_ptr(), current_stream(matrix.device()));
  return sums;
}

void add_some_pairs(const Tensor& payload, int64_t key, const Tensor& matrix, int64_t first, const Tensor& row,
                    const Tensor& edges, const Tensor& sums) {
  constexpr const char* op = "eqaccel::add_some_pairs";
  constexpr int64_t quad = NeighborKernels::quad;
  const int64_t all = row.size(0), rows = edges.size(0);
  TORCH_CHECK(matrix.dim() == 2 && matrix.size(1) % quad == 0 && first >= 0 && first + matrix.size(0) <= all, op,
              ": argument 'matrix' must have rows of ", all, " edges, from argument 'first' on, of a multiple of ",
              quad, " columns, got shape ", matrix.sizes(), " from ", first, ". Pass the rows of a portion.");
  check(op, "matrix", matrix, checked(op, matrix.scalar_type()), matrix.sizes(), matrix);
  check(op, "row", row, at::kInt, {all}, matrix);
  check(op, "edges", edges, at::kInt, {rows, 2}, matrix);
  check(op, "sums", sums, matrix.scalar_type(), {rows, matrix.size(1)}, matrix);
  if (matrix.numel() == 0) return;
  const c10::DeviceGuard guard(matrix.device());
  const int64_t last = first + matrix.size(0);
  kernels_of(op, payload, key, matrix.device(), matrix.scalar_type())
      .add_pairs(matrix.const_data_ptr(), {first, last, last == all}, row.const_data_ptr<int32_t>(),
                 edges.const_data_ptr<int32_t>(), rows, matrix.size(1), sums.mutable_data_ptr(),
                 current_stream(matrix.device()));
}

int64_t check_forces(const Tensor& vectors, const Tensor& gradient, const Tensor& graph, int64_t num_nodes) {
  checked(forces_name, vectors.scalar_type());
  const int64_t capacity = vectors.size(0);
  check(forces_name, "vectors", vectors, vectors.scalar_type(), {capacity, 3}, vectors);
  check(forces_name, "gradient", gradient, vectors.scalar_type(), {capacity, 3}, vectors);
  check_packed(forces_name, graph, {num_nodes, num_nodes, capacity});
  return capacity;
}

Forces forces_on_gpu(const Tensor& payload, int64_t key, const Tensor& vectors, const Tensor& gradient,
                     const Tensor& graph, int64_t num_nodes) {
  const int64_t capacity = check_forces(vectors, gradient, graph, num_nodes);
  const c10::DeviceGuard guard(vectors.device());
  const auto doubles = vectors.options().dtype(at::kDouble);
  const Tensor forces = at::empty({num_nodes, 3}, doubles), virials = at::empty({num_nodes, 3, 3}, doubles);
  const NeighborKernels& kernels = kernels_of(forces_name, payload, key, vectors.device(), vectors.scalar_type());
  kernels.add_forces({num_nodes, capacity, const_cast<void*>(vectors.const_data_ptr()), nullptr,
                      const_cast<int32_t*>(graph.const_data_ptr<int32_t>()), nullptr},
                     gradient.const_data_ptr(), forces.mutable_data_ptr<double>(), virials.mutable_data_ptr<double>(),
                     current_stream(vectors.device()));
  return {forces, virials};
}

template <class T>
void add_forces(const Tensor& vectors, const Tensor& gradient, const Tensor& graph, double* forces, double* virials) {
  const T *v = vectors.const_data_ptr<T>(), *g = gradient.const_data_ptr<T>();
  const int32_t* packed = graph.const_data_ptr<int32_t>();
  const int64_t atoms = packed[0];
  const auto [row_ptr, edge, sender, t_row_ptr, t_slot] = PackedParts(packed, {atoms, atoms, vectors.size(0)});
  at::parallel_for(
      0, atoms, 64,
      [&, row_ptr = row_ptr, edge = edge, t_row_ptr = t_row_ptr, t_slot = t_slot](int64_t begin, int64_t end) {
        for (int64_t atom = begin; atom < end; ++atom) {
          for (int32_t slot = row_ptr[atom]; slot < row_ptr[atom + 1]; ++slot)
            for (int64_t e = 3 * static_cast<int64_t>(edge[slot]), c = 0; c < 3; ++c) {
              forces[3 * atom + c] -= g[e + c];
              for (int64_t d = 0; d < 3; ++d) virials[9 * atom + 3 * d + c] += static_cast<double>(v[e + d]) * g[e + c];
            }
          for (int32_t t = t_row_ptr[atom]; t < t_row_ptr[atom + 1]; ++t)
            for (int64_t e = 3 * static_cast<int64_t>(edge[t_slot[t]]), c = 0; c < 3; ++c)
              forces[3 * atom + c] += g[e + c];
        }
      });
}

Forces forces_on_cpu(const Tensor&, int64_t, const Tensor& vectors, const Tensor& gradient, const Tensor& graph,
                     int64_t num_nodes) {
  check_forces(vectors, gradient, graph, num_nodes);
  const auto doubles = vectors.options().dtype(at::kDouble);
  const Tensor forces = at::zeros({num_nodes, 3}, doubles), virials = at::zeros({num_nodes, 3, 3}, doubles);
  const auto add = vectors.scalar_type() == at::kFloat ? add_forces<float> : add_forces<double>;
  add(vectors, gradient, graph, forces.mutable_data_ptr<double>(), virials.mutable_data_ptr<double>());
  return {forces, virials};
}

TORCH_LIBRARY_IMPL(eqaccel, CPU, library) {
  library.impl("neighbors", on_cpu);
  library.impl("edge_forces", forces_on_cpu);
}
TORCH_LIBRARY_IMPL(eqaccel, CUDA, library) {
  library.impl("neighbors", on_gpu);
  library.impl("neighbor_pairs", pairs_on_gpu);
  library.impl("take_pairs", take_pairs);
  library.impl("spread_pairs", spread_pairs);
  library.impl("add_pairs", add_pairs);
  library.impl("add_some_pairs", add_some_pairs);
  library.impl("edge_forces", forces_on_gpu);
}

}  // namespace neighbors_file
}  // namespace
}  // namespace eqaccel::ops

#include "neighbors.h"

#include <algorithm>
#include <memory>
#include <tuple>

#include "kept.h"

namespace eqaccel {
namespace {

constexpr int64_t lanes = 32;  // that look at one row

}  // namespace

const NeighborKernels& NeighborKernels::get(const Program& program, Backend backend, Scalar scalar, int device) {
  return kept(std::tuple(&program, scalar, device),
              [&] { return std::unique_ptr<NeighborKernels>(new NeighborKernels(program, backend, scalar, device)); });
}

NeighborKernels::NeighborKernels(const Program& program, Backend backend, Scalar scalar, int device)
    : driver_(GpuDriver::get(backend)), device_(device), threads_(static_cast<unsigned>(program.number("threads"))) {
  const Compiled compiled = program.compile(backend, scalar, Direction::forward, driver_.arch(device));
  const GpuDriver::Module module = driver_.load_module(compiled.code, device);
  const DeviceScope scope(driver_, device);
  count_ = driver_.get_function(module, "eq_count_edges");
  write_ = driver_.get_function(module, "eq_write_edges");
  order_ = driver_.get_function(module, "eq_order_by_sender");
  forces_ = driver_.get_function(module, "eq_add_forces");
  count_pairs_ = driver_.get_function(module, "eq_count_pairs");
  write_pairs_ = driver_.get_function(module, "eq_write_pairs");
  add_pairs_ = driver_.get_function(module, "eq_add_pairs");
  add_some_pairs_ = driver_.get_function(module, "eq_add_some_pairs");
  take_pairs_ = driver_.get_function(module, "eq_take_pairs");
  spread_pairs_ = driver_.get_function(module, "eq_spread_pairs");
}

void NeighborKernels::launch(GpuDriver::Function kernel, int64_t rows, void* stream, void** parameters) const {
  launch_elements(kernel, rows * lanes, stream, parameters);
}

void NeighborKernels::launch_elements(GpuDriver::Function kernel, int64_t elements, void* stream,
                                      void** parameters) const {
  const DeviceScope scope(driver_, device_);
  driver_.launch(kernel, {static_cast<unsigned>(ceil_div(elements, threads_))}, {threads_}, 0, stream, parameters);
}

void NeighborKernels::count(const NeighborCandidates& from, int32_t* counts, void* stream) const {
  NeighborCandidates c = from;
  int atoms = static_cast<int>(c.atoms);
  double square = c.cutoff * c.cutoff;
  void* parameters[] = {&c.positions, &c.cells, &c.structure, &atoms, &square, &c.ptr, &c.sender, &c.shift, &counts};
  launch(count_, atoms, stream, parameters);
}

void NeighborKernels::write(const NeighborCandidates& from, const int32_t* ends, const NeighborEdges& to,
                            void* stream) const {
  NeighborCandidates c = from;
  NeighborEdges e = to;
  int atoms = static_cast<int>(c.atoms), nodes = static_cast<int>(e.nodes), capacity = static_cast<int>(e.capacity);
  double square = c.cutoff * c.cutoff;
  void* parameters[] = {&c.positions, &c.cells, &c.structure, &atoms,     &square,       &c.ptr,    &c.sender, &c.shift,
                        &ends,        &nodes,   &capacity,    &e.vectors, &e.edge_index, &e.packed, &e.slot_of};
  launch(write_, atoms, stream, parameters);
  void* of_order[] = {&atoms, &c.t_ptr, &c.t_order, &e.slot_of, &ends, &nodes, &capacity, &e.packed};
  launch(order_, atoms, stream, of_order);
}

void NeighborKernels::count_pairs(int64_t atoms, const NeighborEdges& of, bool all_reversible, int32_t* counts,
                                  void* stream) const {
  NeighborEdges e = of;
  int count = static_cast<int>(atoms), nodes = static_cast<int>(e.nodes), capacity = static_cast<int>(e.capacity);
  void* parameters[] = {&count, &nodes, &capacity, &e.packed, &all_reversible, &counts};
  launch(count_pairs_, atoms, stream, parameters);
}

void NeighborKernels::write_pairs(int64_t atoms, const NeighborEdges& of, bool all_reversible, const int32_t* ends,
                                  const PairRoom& to, void* stream) const {
  NeighborEdges e = of;
  PairRoom p = to;
  int count = static_cast<int>(atoms), nodes = static_cast<int>(e.nodes), capacity = static_cast<int>(e.capacity);
  int room = static_cast<int>(p.rows);
  void* parameters[] = {&count, &nodes, &capacity, &e.packed, &all_reversible,
                        &ends,  &p.row, &p.edges,  &room,     &p.differ};
  launch(write_pairs_, atoms, stream, parameters);
}

void NeighborKernels::take_pairs(const void* values, const int32_t* edges, int64_t rows, int64_t columns, void* taken,
                                 double* differ, void* stream) const {
  int row_count = static_cast<int>(rows), column_count = static_cast<int>(columns);
  void* parameters[] = {&values, &edges, &row_count, &column_count, &taken, &differ};
  launch_elements(take_pairs_, rows * columns, stream, parameters);
}

void NeighborKernels::spread_pairs(const void* taken, const int32_t* row, const int32_t* edges, int64_t count,
                                   int64_t columns, void* values, void* stream) const {
  int edge_count = static_cast<int>(count), column_count = static_cast<int>(columns);
  void* parameters[] = {&taken, &row, &edges, &edge_count, &column_count, &values};
  launch_elements(spread_pairs_, count * columns, stream, parameters);
}

void NeighborKernels::add_pairs(const void* matrix, const int32_t* edges, int64_t rows, int64_t columns, void* sums,
                                void* stream) const {
  int row_count = static_cast<int>(rows), column_count = static_cast<int>(columns);
  void* parameters[] = {&matrix, &edges, &row_count, &column_count, &sums};
  launch(add_pairs_, rows, stream, parameters);
}

void NeighborKernels::add_pairs(const void* matrix, const EdgePortion& of, const int32_t* row, const int32_t* edges,
                                int64_t rows, int64_t columns, void* sums, void* stream) const {
  int first = static_cast<int>(of.first), last = static_cast<int>(of.last), row_count = static_cast<int>(rows),
      column_count = static_cast<int>(columns);
  void* parameters[] = {&matrix, &row, &edges, &first, &last, &row_count, &column_count, &sums};
  const int64_t end = of.is_last ? std::max(of.last, rows) : of.last;  // all rows beyond the last pair get zeros
  launch_elements(add_some_pairs_, (end - of.first) * columns / quad, stream, parameters);
}

void NeighborKernels::add_forces(const NeighborEdges& of, const void* gradient, double* forces, double* virials,
                                 void* stream) const {
  NeighborEdges e = of;
  int nodes = static_cast<int>(e.nodes), capacity = static_cast<int>(e.capacity);
  void* parameters[] = {&nodes, &capacity, &e.vectors, &gradient, &e.packed, &forces, &virials};
  launch(forces_, nodes, stream, parameters);
}

}  // namespace eqaccel

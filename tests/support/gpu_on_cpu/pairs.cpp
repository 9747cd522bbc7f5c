// The kernels of pairs of edges on a CPU, for a program that loads this as a library. EQ_SCALAR is given by
// the compiler's command line.
#include "neighbors.h"

EQ_EXPORT_NEIGHBORS

namespace {

constexpr unsigned threads = 64;  // of a block: two warps

template <class Kernel>
void run(int64_t elements, const Kernel& kernel) {
  launch(unsigned((elements + threads - 1) / threads), threads, kernel);
}

}  // namespace

extern "C" {

void on_cpu_count_pairs(int atoms, int nodes, int capacity, const int32_t* packed, bool all_reversible,
                        int32_t* counts) {
  run(int64_t(atoms) * warp, [&] { eq_count_pairs(atoms, nodes, capacity, packed, all_reversible, counts); });
}

void on_cpu_write_pairs(int atoms, int nodes, int capacity, const int32_t* packed, bool all_reversible,
                        const int32_t* ends, int room, int32_t* row, int2* edges, double* differ) {
  run(int64_t(atoms) * warp,
      [&] { eq_write_pairs(atoms, nodes, capacity, packed, all_reversible, ends, row, edges, room, differ); });
}

void on_cpu_take_pairs(const T* values, const int2* edges, int rows, int columns, T* taken, double* differ) {
  run(int64_t(rows) * columns, [&] { eq_take_pairs(values, edges, rows, columns, taken, differ); });
}

void on_cpu_spread_pairs(const T* taken, const int32_t* row, const int2* edges, int count, int columns, T* values) {
  run(int64_t(count) * columns, [&] { eq_spread_pairs(taken, row, edges, count, columns, values); });
}

void on_cpu_add_pairs(const T* matrix, const int2* edges, int rows, int columns, T* sums) {
  run(int64_t(rows) * warp, [&] { eq_add_pairs(matrix, edges, rows, columns, sums); });
}

void on_cpu_add_some_pairs(const T* matrix, const int32_t* row, const int2* edges, int first, int last, int rows,
                           int columns, int end, T* sums) {
  run(int64_t(end - first) * columns / quad,
      [&] { eq_add_some_pairs(matrix, row, edges, first, last, rows, columns, sums); });
}
}

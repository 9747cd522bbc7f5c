// CPU prelude of linear maps: the derivative by weights, a sum over rows and components of products of x and gz.
//
// Rows are taken in the order of their attributes, a window after the other, in which rows of gz are laid out with SIMD
// vectors of channels. A thread has some rows of a matrix of weights and one or two vectors of its columns, and of one chunk
// of rows after the other, for one attribute after the other, adds up the products in registers, and these sums in memory.
// So an element is off by no more roundings than products of a chunk and chunks together, and it is the same with any
// number of threads.
#pragma once
#include "cpu_linear.h"

namespace {

constexpr int chunk = 256;  // rows that are added up in registers: what is read of them stays in the nearest cache
constexpr int window = 4 * chunk;  // rows that are laid out at a time
constexpr int jobs_of_thread = 4;  // at least, so that all threads end at about the same time

// The numbers of a map, from its tables: `write_weights` in weights.py writes them.
struct WeightsMap : MapSizes {
  static constexpr int sizes = 6, block_size = 3, matrix_size = 4;
  int blocks, matrices;
  int64_t weights;
  const int64_t *block_table, *matrix_table;

  explicit WeightsMap(const eq_tables& tables)
      : MapSizes(tables), blocks(tables.integers[3]), matrices(tables.integers[4]), weights(tables.integers[5]),
        block_table(tables.integers + sizes), matrix_table(block_table + blocks * block_size) {}

  Written block(int n) const {
    const int64_t* at = block_table + n * block_size;
    return {int(at[0]), int(at[1]), int(at[2])};
  }
  Matrix matrix(int n) const {
    const int64_t* at = matrix_table + n * matrix_size;
    return {int(at[0]), int(at[1]), int(at[2]), at[3], T(coefficients[n])};
  }
};

// Lays out the components of a block of a row, `stride` apart, each as its channels one after the other.
template <int known_components>
EQ_FN void take_apart(const T* __restrict__ from, const Written& block, T scale, int stride, T* __restrict__ lines) {
  const int components = known_components > 0 ? known_components : block.components;
#pragma omp simd
  for (int u = 0; u < block.mul; ++u)
#pragma GCC unroll 8
    for (int c = 0; c < components; ++c) lines[c * stride + u] = scale * from[u * components + c];
}

// What all threads read: rows of gz as they are laid out, and the rows of each chunk that have an attribute.
struct WeightSums {
  const eq_operands& o;
  const WeightsMap map;
  const int64_t width;  // of a row, laid out
  bool are_scaled = false;  // whether rows are laid out times their attribute, as no row has more than one
  int num_present = 0;
  T* staged;
  int64_t* begin;  // in the list, of each attribute that occurs, in one chunk after the other
  int32_t *list, *order, *present;  // rows as numbers in their order; rows in their order; attributes that occur

  explicit WeightSums(const eq_operands& operands)
      : o(operands), map(*operands.tables), width(place(map.blocks)), staged(static_cast<T*>(o.workspace)),
        begin(reinterpret_cast<int64_t*>(staged + staged_rows() * width)),
        list(reinterpret_cast<int32_t*>(begin + most_ranges() + 1)), order(list + o.num_edges * map.kinds),
        present(order + o.num_edges) {}

  int64_t staged_rows() const { return o.num_edges < window ? o.num_edges : window; }
  int64_t most_ranges() const { return (o.num_edges + chunk - 1) / chunk * map.kinds; }
  // Where lines of a block begin: as many SIMD vectors each as its channels take.
  static int stride(const Written& block) { return (block.mul + lanes - 1) / lanes * lanes; }
  int64_t place(int block) const {
    int64_t at = 0;
    for (int n = 0; n < block; ++n) at += map.block(n).components * stride(map.block(n));
    return at;
  }
  int64_t bytes() const {
    return staged_rows() * width * sizeof(T) + (most_ranges() + 1) * sizeof(int64_t) +
           (o.num_edges * (map.kinds + 1) + map.kinds) * sizeof(int32_t);
  }
  T attribute(int64_t row, int z) const { return map.attribute(o, row, z); }
  // Orders rows, and lists those of each chunk that have an attribute, one attribute after the other.
  void find() {
    const int64_t rows = map.find_order(o, order, present);
    for (int z = 0; z < map.kinds; ++z)
      if (present[z]) present[num_present++] = z;
    int64_t count = 0, range = 0;
    for (int64_t first = 0; first < o.num_edges; first += chunk) {
      const int64_t last = rows - first < chunk ? rows : first + chunk;
      for (int n = 0; n < num_present; ++n) {
        begin[range++] = count;
        for (int64_t number = first; number < last; ++number)
          if (attribute(order[number], present[n]) != 0) list[count++] = number;
      }
    }
    begin[range] = count;
    are_scaled = count == rows;
  }
  // Lays out a row.
  void stage(int64_t row, T* to) const {
    T scale = 1;
    if (are_scaled)
      for (int n = 0; n < num_present; ++n)
        if (attribute(row, present[n]) != 0) scale = attribute(row, present[n]);
    for (int n = 0; n < map.blocks; ++n) {
      const Written block = map.block(n);
      const T* from = static_cast<const T*>(o.gz) + row * int64_t(map.out_dim) + block.first;
      const int columns = stride(block);
      switch (block.components) {
        case 1: take_apart<1>(from, block, scale, columns, to); break;
        case 3: take_apart<3>(from, block, scale, columns, to); break;
        case 5: take_apart<5>(from, block, scale, columns, to); break;
        default: take_apart<0>(from, block, scale, columns, to);
      }
      for (int c = 0; c < block.components; ++c)
        for (int u = block.mul; u < columns; ++u) to[c * columns + u] = 0;
      to += columns * block.components;
    }
  }
};

// Some columns of matrices of weights, which a path has for each attribute.
struct WeightJob {
  const WeightSums& sums;
  const Matrix m;
  const Written block;
  const int column;
  const int64_t window_first;

  // The entries `begin` to `end` of the list for `count` rows of the matrix of an attribute, and SIMD vectors of its columns.
  // A function of its own, so that registers are for this loop alone.
  template <int count, int vectors, bool scales, int known_components>
  __attribute__((noinline)) void add_products(int row, int z, int64_t begin, int64_t end) const {
    const int components = known_components > 0 ? known_components : block.components;
    const int64_t stride = WeightSums::stride(block), width = sums.width, in_dim = sums.map.in_dim;
    const T* const staged = sums.staged + sums.place(m.block) + column - window_first * width;
    const T* const from_x = static_cast<const T*>(sums.o.x) + m.first + row * components;
    const int32_t *const list = sums.list, *const order = sums.order;
    Lane sum[count][vectors] = {};
    for (int64_t i = begin; i < end; ++i) {
      const int64_t number = list[i], from = order[number];
      const T scale = scales ? sums.attribute(from, z) : T(1);
      const T *x = from_x + from * in_dim, *line = staged + number * width;
      for (int c = 0; c < components; ++c, ++x, line += stride) {
        Lane columns[vectors];
#pragma GCC unroll 2
        for (int v = 0; v < vectors; ++v) {
          columns[v] = *(const UnalignedLane*)(line + v * lanes);
          if (scales) columns[v] = scale * columns[v];
        }
#pragma GCC unroll 64
        for (int r = 0; r < count; ++r)
#pragma GCC unroll 2
          for (int v = 0; v < vectors; ++v) sum[r][v] = fma(x[r * components], columns[v], sum[r][v]);
      }
    }
    const int left = block.mul - column, columns = left < vectors * lanes ? left : vectors * lanes;
    for (int r = 0; r < count; ++r) {
      T* to = static_cast<T*>(sums.o.gw) + m.begin + (int64_t(row + r) * sums.map.kinds + z) * block.mul + column;
      const T* values = reinterpret_cast<const T*>(sum[r]);
#pragma omp simd
      for (int u = 0; u < columns; ++u) to[u] += m.coefficient * values[u];
    }
  }

  template <int count, int vectors, bool scales>
  void add(int row, int z, int64_t begin, int64_t end) const {
    if (block.components == 1) add_products<count, vectors, scales, 1>(row, z, begin, end);
    else add_products<count, vectors, scales, 0>(row, z, begin, end);
  }

  // Rows of the matrices from `row` on, of the attributes that occur from `first` on; `end`: of the window.
  template <int vectors, bool scales>
  void add_chunks(int row, int first, int last, int64_t end) const {
    const int last_row = m.mul_in - row < height ? m.mul_in : row + height;
    for (int64_t number = window_first; number < end; number += chunk) {
      const int64_t* begin = sums.begin + number / chunk * sums.num_present;
      for (int n = first; n < last; ++n) {
        const int z = sums.present[n];
        const int64_t from = begin[n], to = begin[n + 1];
        if (from == to) continue;
        int u = row;
        for (; u + height <= last_row; u += height) add<height, vectors, scales>(u, z, from, to);
        for (; u + height / 3 <= last_row; u += height / 3) add<height / 3, vectors, scales>(u, z, from, to);
        for (; u < last_row; ++u) add<1, vectors, scales>(u, z, from, to);
      }
    }
  }

  void run(int row, int first, int last, int64_t end) const {
    const bool is_narrow = block.mul - column <= lanes;
    if (sums.are_scaled && is_narrow) add_chunks<1, false>(row, first, last, end);
    else if (sums.are_scaled) add_chunks<2, false>(row, first, last, end);
    else if (is_narrow) add_chunks<1, true>(row, first, last, end);
    else add_chunks<2, true>(row, first, last, end);
  }
};

void launch_weights(const eq_operands& o) {
  WeightSums sums(o);
  const WeightsMap& map = sums.map;
  sums.find();
  const auto panels_of = [&](const Matrix& m) { return padded_columns(map.block(m.block).mul) / panel; };
  const auto parts_of = [&](const Matrix& m) { return (m.mul_in + height - 1) / height * panels_of(m); };
  int parts = 0;
  for (int n = 0; n < map.matrices; ++n) parts += parts_of(map.matrix(n));
  // Attributes that are taken one after the other, of which the rest of a part is the same.
  const int wanted = (jobs_of_thread * o.threads + parts - 1) / (parts > 0 ? parts : 1);
  const int groups = wanted < sums.num_present ? wanted : sums.num_present, jobs = parts * groups;
  T* gw = static_cast<T*>(o.gw);
#pragma omp parallel num_threads(o.threads)
  {
#pragma omp for schedule(static)
    for (int64_t n = 0; n < map.weights; ++n) gw[n] = 0;
    for (int64_t first = 0; first < o.num_edges; first += window) {
      const int64_t end = o.num_edges - first < window ? o.num_edges : first + window;
#pragma omp for schedule(static)
      for (int64_t n = first; n < end; ++n) sums.stage(sums.order[n], sums.staged + (n - first) * sums.width);
#pragma omp for schedule(dynamic)
      for (int job = 0; job < jobs; ++job) {
        int n = 0, part = job / groups;
        for (; part >= parts_of(map.matrix(n)); ++n) part -= parts_of(map.matrix(n));
        const Matrix m = map.matrix(n);
        const int group = job % groups, panels = panels_of(m);
        WeightJob{sums, m, map.block(m.block), part % panels * panel, first}.run(
            part / panels * height, group * sums.num_present / groups, (group + 1) * sums.num_present / groups, end);
      }
    }
  }
}

}  // namespace

#define EQ_EXPORT_LINEAR_WEIGHTS                                                                                       \
  extern "C" __attribute__((visibility("default"))) void eq_launch(const eq_operands* o) { launch_weights(*o); }       \
                                                                                                                       \
  extern "C" __attribute__((visibility("default"))) int64_t eq_workspace_bytes(const eq_operands* o) {                 \
    return WeightSums(*o).bytes();                                                                                     \
  }

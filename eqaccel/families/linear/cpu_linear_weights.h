// CPU prelude of linear maps: the derivative by weights, a sum over rows and components of products of x and gz.
//
// A row is taken once for each attribute that it has, and what it has of one attribute after the other. Some of these at a
// time, rows of gz are laid out with SIMD vectors of channels, times the attribute. A thread then has some rows of a matrix
// and two vectors of its columns, and adds up its products in registers, a piece of so many rows after the other, and these
// sums in memory. So an element is off by no more roundings than products of a piece and pieces together, and it is the
// same with any number of threads.
#pragma once
#include "cpu_linear.h"

namespace {

constexpr int together = 1024;  // rows that are laid out at a time
constexpr int piece = 64;  // rows that are added up in registers

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

struct WeightSums {
  const eq_operands& o;
  const WeightsMap map;
  const int kinds;
  int64_t staged_rows, width;
  T* staged;
  int64_t* begin;  // of each attribute in the lists
  int32_t *rows, *kind;

  explicit WeightSums(const eq_operands& operands)
      : o(operands), map(*operands.tables), kinds(map.kinds),
        staged_rows(most_rows() < together ? most_rows() : together), width(place(map.blocks)),
        staged(static_cast<T*>(o.workspace)), begin(reinterpret_cast<int64_t*>(staged + staged_rows * width)),
        rows(reinterpret_cast<int32_t*>(begin + kinds + 1)), kind(rows + most_rows()) {}

  int64_t most_rows() const { return o.num_edges * kinds; }
  int64_t place(int block) const {
    int64_t at = 0;
    for (int n = 0; n < block; ++n) at += map.block(n).components * padded_columns(map.block(n).mul);
    return at;
  }
  int64_t bytes() const {
    return staged_rows * width * sizeof(T) + (kinds + 1) * sizeof(int64_t) + 2 * most_rows() * sizeof(int32_t);
  }
  T attribute(int64_t row, int z) const { return map.attribute(o, row, z); }
  // Lists the rows of each attribute, in their order.
  void find() {
    for (int z = 0; z <= kinds; ++z) begin[z] = 0;
    for (int64_t row = 0; row < o.num_edges; ++row)
      for (int z = 0; z < kinds; ++z) begin[z + 1] += attribute(row, z) != 0;
    for (int z = 0; z < kinds; ++z) begin[z + 1] += begin[z];
    for (int64_t row = 0; row < o.num_edges; ++row)
      for (int z = 0; z < kinds; ++z)
        if (attribute(row, z) != 0) {
          rows[begin[z]] = row;
          kind[begin[z]++] = z;
        }
    for (int z = kinds; z > 0; --z) begin[z] = begin[z - 1];
    begin[0] = 0;
  }
  // Lays out entry i of the lists.
  void stage(int64_t i, T* to) const {
    const T scale = attribute(rows[i], kind[i]);
    for (int n = 0; n < map.blocks; ++n) {
      const Written block = map.block(n);
      const T* from = static_cast<const T*>(o.gz) + rows[i] * int64_t(map.out_dim) + block.first;
      const int stride = padded_columns(block.mul);
      switch (block.components) {
        case 1: take_apart<1>(from, block, scale, stride, to); break;
        case 3: take_apart<3>(from, block, scale, stride, to); break;
        case 5: take_apart<5>(from, block, scale, stride, to); break;
        default: take_apart<0>(from, block, scale, stride, to);
      }
      for (int c = 0; c < block.components; ++c)
        for (int u = block.mul; u < stride; ++u) to[c * stride + u] = 0;
      to += stride * block.components;
    }
  }
};

// Some rows of a matrix, of consecutive channels of x, and the columns of a panel.
template <int count>
EQ_FN void add_products(const WeightSums& sums, const Matrix& m, int first, int p, int z, const T* staged,
                        int64_t begin, int64_t end) {
  const Written block = sums.map.block(m.block);
  const int mul = block.mul, components = block.components, stride = padded_columns(mul);
  Lane sum[count][2] = {};
  for (int64_t i = begin; i < end; ++i, staged += sums.width) {
    const T* x =
        static_cast<const T*>(sums.o.x) + sums.rows[i] * int64_t(sums.map.in_dim) + m.first + first * components;
    const T* line = staged;
    for (int c = 0; c < components; ++c, ++x, line += stride) {
      const Lane left = *(const UnalignedLane*)line, right = *(const UnalignedLane*)(line + lanes);
#pragma GCC unroll 64
      for (int r = 0; r < count; ++r) {
        sum[r][0] = fma(x[r * components], left, sum[r][0]);
        sum[r][1] = fma(x[r * components], right, sum[r][1]);
      }
    }
  }
  const int columns = mul - p * panel < panel ? mul - p * panel : panel;
  for (int r = 0; r < count; ++r) {
    T* to = static_cast<T*>(sums.o.gw) + m.begin + (int64_t(first + r) * sums.kinds + z) * mul + p * panel;
    if (columns == panel) {
      for (int n = 0; n < 2; ++n) {
        UnalignedLane& part = *(UnalignedLane*)(to + n * lanes);
        part = m.coefficient * sum[r][n] + part;
      }
    } else {
      const T* values = reinterpret_cast<const T*>(sum[r]);
      for (int u = 0; u < columns; ++u) to[u] += m.coefficient * values[u];
    }
  }
}

// The entries `begin` to `end` of the lists, for some rows of a matrix and a panel.
void add_pieces(const WeightSums& sums, const Matrix& m, int first, int p, int64_t begin, int64_t end) {
  const T* staged = sums.staged + sums.place(m.block) + p * panel;
  const int last = m.mul_in - first < height ? m.mul_in : first + height;
  for (int z = 0; z < sums.kinds; ++z) {
    const int64_t from = sums.begin[z] > begin ? sums.begin[z] : begin;
    const int64_t to = sums.begin[z + 1] < end ? sums.begin[z + 1] : end;
    for (int64_t i = from; i < to; i += piece) {
      const int64_t stop = to - i < piece ? to : i + piece;
      const T* lines = staged + (i - begin) * sums.width;
      int u = first;
      for (; u + height <= last; u += height) add_products<height>(sums, m, u, p, z, lines, i, stop);
      for (; u + height / 3 <= last; u += height / 3) add_products<height / 3>(sums, m, u, p, z, lines, i, stop);
      for (; u < last; ++u) add_products<1>(sums, m, u, p, z, lines, i, stop);
    }
  }
}

void launch_weights(const eq_operands& o) {
  WeightSums sums(o);
  const WeightsMap& map = sums.map;
  sums.find();
  const int64_t count = sums.begin[sums.kinds];
  const auto panels_of = [&](const Matrix& m) { return padded_columns(map.block(m.block).mul) / panel; };
  const auto jobs_of = [&](const Matrix& m) { return (m.mul_in + height - 1) / height * panels_of(m); };
  int jobs = 0;
  for (int n = 0; n < map.matrices; ++n) jobs += jobs_of(map.matrix(n));
  T* gw = static_cast<T*>(o.gw);
#pragma omp parallel num_threads(o.threads)
  {
#pragma omp for schedule(static)
    for (int64_t n = 0; n < map.weights; ++n) gw[n] = 0;
    for (int64_t begin = 0; begin < count; begin += together) {
      const int64_t end = count - begin < together ? count : begin + together;
#pragma omp for schedule(static)
      for (int64_t i = begin; i < end; ++i) sums.stage(i, sums.staged + (i - begin) * sums.width);
#pragma omp for schedule(dynamic)
      for (int job = 0; job < jobs; ++job) {
        int n = 0, left = job;
        for (; left >= jobs_of(map.matrix(n)); ++n) left -= jobs_of(map.matrix(n));
        const Matrix m = map.matrix(n);
        add_pieces(sums, m, left / panels_of(m) * height, left % panels_of(m), begin, end);
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

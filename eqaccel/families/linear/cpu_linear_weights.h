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

template <class P>
struct WeightSums {
  static constexpr int kinds = P::attributes > 0 ? P::attributes : 1;
  const eq_operands& o;
  int64_t staged_rows, width;
  T* staged;
  int64_t* begin;  // of each attribute in the lists
  int32_t *rows, *kind;

  static constexpr int padded_columns(int mul) { return (mul + panel - 1) / panel * panel; }
  static int64_t place(int block) {
    int64_t at = 0;
    for (int n = 0; n < block; ++n) at += P::block(n).components * padded_columns(P::block(n).mul);
    return at;
  }
  static int64_t most_rows_of(const eq_operands& o) { return o.num_edges * kinds; }
  static int64_t staged_rows_of(const eq_operands& o) {
    return most_rows_of(o) < together ? most_rows_of(o) : together;
  }
  static int64_t bytes(const eq_operands& o) {
    return staged_rows_of(o) * place(P::blocks) * sizeof(T) + (kinds + 1) * sizeof(int64_t) +
           2 * most_rows_of(o) * sizeof(int32_t);
  }
  explicit WeightSums(const eq_operands& operands)
      : o(operands), staged_rows(staged_rows_of(o)), width(place(P::blocks)), staged(static_cast<T*>(o.workspace)),
        begin(reinterpret_cast<int64_t*>(staged + staged_rows * width)),
        rows(reinterpret_cast<int32_t*>(begin + kinds + 1)), kind(rows + most_rows_of(o)) {}

  T attribute(int64_t row, int z) const {
    if constexpr (P::attributes == 0) return 1;
    else return static_cast<const T*>(o.y)[row * P::attributes + z];
  }
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
    for (int n = 0; n < P::blocks; ++n) {
      const Written block = P::block(n);
      const T* __restrict__ from = static_cast<const T*>(o.gz) + rows[i] * int64_t(P::out_dim) + block.first;
      const int stride = padded_columns(block.mul);
      T* __restrict__ lines = to;
      P::with_components(block.components, [&](auto tag) {
        constexpr int components = decltype(tag)::count;
#pragma omp simd
        for (int u = 0; u < block.mul; ++u)
#pragma GCC unroll 32
          for (int c = 0; c < components; ++c) lines[c * stride + u] = scale * from[u * components + c];
      });
      for (int c = 0; c < block.components; ++c)
        for (int u = block.mul; u < stride; ++u) to[c * stride + u] = 0;
      to += stride * block.components;
    }
  }
};

// Some rows of a matrix, of consecutive channels of x, and the columns of a panel.
template <class P, int components, int height>
EQ_FN void add_products(const WeightSums<P>& sums, const Matrix& m, int first, int p, int z, const T* staged,
                        int64_t begin, int64_t end) {
  const int mul = P::block(m.block).mul, stride = sums.padded_columns(mul);
  Lane sum[height][2] = {};
  for (int64_t i = begin; i < end; ++i, staged += sums.width) {
    const T* x = static_cast<const T*>(sums.o.x) + sums.rows[i] * int64_t(P::in_dim) + m.first + first * components;
#pragma GCC unroll 2
    for (int c = 0; c < components; ++c) {
      const Lane left = *(const UnalignedLane*)(staged + c * stride);
      const Lane right = *(const UnalignedLane*)(staged + c * stride + lanes);
#pragma GCC unroll 64
      for (int r = 0; r < height; ++r) {
        sum[r][0] = fma(x[r * components + c], left, sum[r][0]);
        sum[r][1] = fma(x[r * components + c], right, sum[r][1]);
      }
    }
  }
  const int columns = mul - p * panel < panel ? mul - p * panel : panel;
  for (int r = 0; r < height; ++r) {
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
template <class P, int components>
void add_pieces(const WeightSums<P>& sums, const Matrix& m, int first, int p, int64_t begin, int64_t end) {
  const T* staged = sums.staged + sums.place(m.block) + p * panel;
  const int last = m.mul_in - first < most_rows ? m.mul_in : first + most_rows;
  for (int z = 0; z < sums.kinds; ++z) {
    const int64_t from = sums.begin[z] > begin ? sums.begin[z] : begin;
    const int64_t to = sums.begin[z + 1] < end ? sums.begin[z + 1] : end;
    for (int64_t i = from; i < to; i += piece) {
      const int64_t stop = to - i < piece ? to : i + piece;
      const T* lines = staged + (i - begin) * sums.width;
      int u = first;
      for (; u + most_rows <= last; u += most_rows)
        add_products<P, components, most_rows>(sums, m, u, p, z, lines, i, stop);
      for (; u + most_rows / 3 <= last; u += most_rows / 3)
        add_products<P, components, most_rows / 3>(sums, m, u, p, z, lines, i, stop);
      for (; u < last; ++u) add_products<P, components, 1>(sums, m, u, p, z, lines, i, stop);
    }
  }
}

template <class P>
void launch_weights(const eq_operands& o) {
  WeightSums<P> sums(o);
  sums.find();
  const int64_t count = sums.begin[sums.kinds];
  const auto height_of = [](const Matrix& m) { return (m.mul_in + most_rows - 1) / most_rows; };
  const auto panels_of = [](const Matrix& m) { return (P::block(m.block).mul + panel - 1) / panel; };
  int jobs = 0;
  for (int n = 0; n < P::matrices; ++n) jobs += height_of(P::matrix(n)) * panels_of(P::matrix(n));
  T* gw = static_cast<T*>(o.gw);
#pragma omp parallel num_threads(o.threads)
  {
#pragma omp for schedule(static)
    for (int64_t n = 0; n < P::weights; ++n) gw[n] = 0;
    for (int64_t begin = 0; begin < count; begin += together) {
      const int64_t end = count - begin < together ? count : begin + together;
#pragma omp for schedule(static)
      for (int64_t i = begin; i < end; ++i) sums.stage(i, sums.staged + (i - begin) * sums.width);
#pragma omp for schedule(dynamic)
      for (int job = 0; job < jobs; ++job) {
        int n = 0, left = job;
        for (; left >= height_of(P::matrix(n)) * panels_of(P::matrix(n)); ++n)
          left -= height_of(P::matrix(n)) * panels_of(P::matrix(n));
        const Matrix m = P::matrix(n);
        P::with_components(P::block(m.block).components, [&](auto tag) {
          add_pieces<P, decltype(tag)::count>(sums, m, left / panels_of(m) * most_rows, left % panels_of(m), begin,
                                              end);
        });
      }
    }
  }
}

}  // namespace

#define EQ_EXPORT_LINEAR_WEIGHTS(P)                                                                                    \
  extern "C" __attribute__((visibility("default"))) void eq_launch(const eq_operands* o) { launch_weights<P>(*o); }    \
                                                                                                                       \
  extern "C" __attribute__((visibility("default"))) int64_t eq_workspace_bytes(const eq_operands* o) {                 \
    return WeightSums<P>::bytes(*o);                                                                                   \
  }

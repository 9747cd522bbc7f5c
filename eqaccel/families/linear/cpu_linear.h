// CPU prelude of linear maps: matrices of the attributes that occur are packed, and rows multiplied by them in groups.
//
// A group is some lines, each a component of a row, in the order of their attributes; two SIMD vectors hold columns of a
// sum for each of these, or one where there are no more columns. What is read is laid out for that once a group. The
// product with the matrix of an attribute is added to the lines of rows that have it, times the attribute. One kernel
// serves all maps, whose numbers come in tables.
#pragma once
#include "abi.h"
#include "cpu_lane.h"
#include "direction.h"
#include "linear.h"

namespace {

constexpr int panel = 2 * lanes;  // columns of the packed matrices that are beside each other
constexpr int height = EQ_SIMD_BYTES == 64 ? 12 : 6;  // lines of a group: as many sums as registers hold

int padded_columns(int mul) { return (mul + panel - 1) / panel * panel; }
// What so many int32 take of scratch.
int64_t cells(int64_t numbers) { return (numbers * sizeof(int32_t) + sizeof(T) - 1) / sizeof(T); }

// What the tables of all directions begin with.
struct MapSizes {
  int in_dim, out_dim, attributes;
  int kinds;  // of rows: one for each attribute
  const double* coefficients;

  explicit MapSizes(const eq_tables& tables)
      : in_dim(tables.integers[0]), out_dim(tables.integers[1]), attributes(tables.integers[2]),
        kinds(attributes > 0 ? attributes : 1), coefficients(tables.reals) {}

  T attribute(const eq_operands& o, int64_t row, int z) const {
    return attributes == 0 ? T(1) : static_cast<const T*>(o.y)[row * attributes + z];
  }
  // Rows by their first attribute that is not zero, in their order otherwise, those without any last; and whether each
  // attribute occurs. Returns how many rows have any.
  int64_t find_order(const eq_operands& o, int32_t* order, int32_t* present) const {
    const Scratch sort(cells(o.num_edges + kinds + 2), 1);
    int32_t *const first = reinterpret_cast<int32_t*>(sort.of(0)), *const places = first + o.num_edges;
    for (int z = 0; z < kinds; ++z) present[z] = attributes == 0;
    for (int z = 0; z <= kinds + 1; ++z) places[z] = 0;
    for (int64_t row = 0; row < o.num_edges; ++row) {
      int key = attributes == 0 ? 0 : kinds;
      for (int z = attributes; z-- > 0;)
        if (attribute(o, row, z) != 0) present[key = z] = 1;
      first[row] = key;
      ++places[key + 1];
    }
    for (int z = 1; z <= kinds; ++z) places[z] += places[z - 1];
    for (int64_t row = 0; row < o.num_edges; ++row) order[places[first[row]]++] = row;
    return places[kinds - 1];
  }
};

// What a direction is, from its tables: `write_linear` in body.py writes them.
struct LinearMap : MapSizes {
  static constexpr int sizes = 6, output_size = 5, factor_size = 5;
  int outputs, factors, most_staged;
  const int64_t *output_table, *factor_table;

  explicit LinearMap(const eq_tables& tables)
      : MapSizes(tables), outputs(tables.integers[3]), factors(tables.integers[4]), most_staged(tables.integers[5]),
        output_table(tables.integers + sizes), factor_table(output_table + outputs * output_size) {}

  Output output(int n) const {
    const int64_t* at = output_table + n * output_size;
    return {int(at[0]), int(at[1]), int(at[2]), int(at[3]), int(at[4])};
  }
  Factor factor(int n) const {
    const int64_t* at = factor_table + n * factor_size;
    return {int(at[0]), int(at[1]), at[2], at[3], at[4], T(coefficients[n])};
  }
};

// The packed matrices, the order of the rows, and which attributes occur: the workspace.
struct Maps {
  const eq_operands& o;
  const LinearMap map;
  const int matrices;  // of a factor
  const T* from;
  T* to;
  T* packed;
  int32_t* order;
  int32_t* present;

  explicit Maps(const eq_operands& operands)
      : o(operands), map(*operands.tables), matrices(map.kinds), from(static_cast<const T*>(has_gradient ? o.gz : o.x)),
        to(static_cast<T*>(has_gradient ? o.gx : o.z)), packed(static_cast<T*>(o.workspace)),
        order(reinterpret_cast<int32_t*>(packed + packed_size())), present(order + o.num_edges) {}

  int64_t terms_of(int begin, int end) const {
    int64_t terms = 0;
    for (int f = begin; f < end; ++f) terms += map.factor(f).terms;
    return terms;
  }
  int64_t output_size(const Output& out) const {
    return terms_of(out.begin, out.end) * matrices * padded_columns(out.mul);
  }
  int64_t packed_size() const {
    int64_t size = 0;
    for (int n = 0; n < map.outputs; ++n) size += output_size(map.output(n));
    return size;
  }
  int64_t bytes() const { return packed_size() * sizeof(T) + (o.num_edges + matrices) * sizeof(int32_t); }

  T attribute(int64_t row, int z) const { return map.attribute(o, row, z); }

  // The packed matrix of a factor and an attribute in a panel of an output; factors of a panel follow each other.
  T* pack(const Output& out, T* base, int p, int f, int z) const {
    const int64_t before = terms_of(out.begin, f), all = before + terms_of(f, out.end);
    return base + ((all * p + before) * matrices + int64_t(map.factor(f).terms) * z) * panel;
  }
  void fill(const Output& out, T* base, int p, int f) const {
    const Factor factor = map.factor(f);
    const int first = p * panel, count = out.mul - first < panel ? out.mul - first : panel;
    for (int z = 0; z < matrices; ++z) {
      if (!present[z]) continue;
      T* to_panel = pack(out, base, p, f, z);
      if (count < panel) memset(to_panel, 0, sizeof(T) * panel * factor.terms);
      // Weights are read in their order, which may be that of the terms of a column: others are far away.
      if constexpr (has_gradient) {
        for (int c = 0; c < count; ++c) {
          const T* const column = factor.weights(o.w, z, 0, first + c);
          for (int k = 0; k < factor.terms; ++k) to_panel[k * panel + c] = factor.coefficient * column[k];
        }
      } else {
        for (int k = 0; k < factor.terms; ++k) {
          const T* const line = factor.weights(o.w, z, k, first);
#pragma omp simd
          for (int c = 0; c < count; ++c) to_panel[k * panel + c] = factor.coefficient * line[c];
        }
      }
    }
  }
  void fill_all() const {
    T* base = packed;
    for (int n = 0; n < map.outputs; ++n) {
      const Output out = map.output(n);
      const int count = out.end - out.begin, jobs = padded_columns(out.mul) / panel * count;
#pragma omp for schedule(static)
      for (int job = 0; job < jobs; ++job) fill(out, base, job / count, out.begin + job % count);
      base += output_size(out);
    }
  }
};

// Some lines and what they have in common; `staged` has the operands of all factors one after the other.
struct Group {
  const Maps& maps;
  T* staged;
  T* scales;  // of each line, for each attribute that one of the rows has
  int32_t* used;  // attributes that one of the rows has
  int num_used = 0;
  int count = 0, components = 1;  // lines, and lines of a row
  int64_t rows[height] = {};  // of each line; of those that are left over, that of the last
  int component[height] = {};

  // Takes lines of an output, from `first` on.
  void take(const Output& out, int64_t first) {
    components = out.components;
    const int64_t left = maps.o.num_edges * components - first;
    count = left < height ? left : height;
    for (int r = 0; r < height; ++r) {
      const int64_t line = first + (r < count ? r : count - 1);
      rows[r] = maps.order[line / components];
      component[r] = line % components;
    }
    num_used = 0;
    for (int z = 0; z < maps.matrices; ++z) {
      if (!maps.present[z]) continue;
      T* const own = scales + num_used * height;
      bool any = false;
      for (int r = 0; r < count; ++r) {
        own[r] = maps.attribute(rows[r], z);
        any = any || own[r] != 0;
      }
      if (any) used[num_used++] = z;
    }
  }
  void stage(const Output& out) const {
    T* next = staged;
    for (int f = out.begin; f < out.end; ++f) {
      const Factor factor = maps.map.factor(f);
      const T* line[height];
      for (int r = 0; r < height; ++r) line[r] = maps.from + rows[r] * maps.map.in_dim + factor.first + component[r];
      for (int64_t k = 0; k < factor.terms; ++k, next += height)
#pragma GCC unroll 64
        for (int r = 0; r < height; ++r) next[r] = line[r][k * components];
    }
  }

  template <int vectors>
  using Sums = Lane[height][vectors];

  // Adds the products of lines, laid out, with a panel of a matrix.
  template <int vectors>
  EQ_FN static void add(const T* x, const T* w, int terms, Sums<vectors>& sum) {
    for (int k = 0; k < terms; ++k, x += height, w += panel) {
      Lane columns[vectors];
      for (int v = 0; v < vectors; ++v) columns[v] = *(const UnalignedLane*)(w + v * lanes);
#pragma GCC unroll 64
      for (int r = 0; r < height; ++r)
        for (int v = 0; v < vectors; ++v) sum[r][v] = fma(x[r], columns[v], sum[r][v]);
    }
  }
  // A panel of an output, of whose columns so many SIMD vectors are there.
  template <int vectors>
  void multiply(const Output& out, T* base, int p) const {
    Sums<vectors> sum = {};
    const T* x = staged;
    for (int f = out.begin; f < out.end; ++f) {
      const int terms = maps.map.factor(f).terms;
      if (maps.map.attributes == 0) {
        add<vectors>(x, maps.pack(out, base, p, f, 0), terms, sum);
      } else {
        for (int n = 0; n < num_used; ++n)
          add_attribute<vectors>(x, maps.pack(out, base, p, f, used[n]), terms, n, sum);
      }
      x += terms * height;
    }
    write<vectors>(out, p, sum);
  }
  // The same of the n-th attribute in use, times it; rows that have none of it are left as they are.
  template <int vectors>
  __attribute__((noinline)) void add_attribute(const T* x, const T* w, int terms, int n, Sums<vectors>& sum) const {
    Sums<vectors> part = {};
    add<vectors>(x, w, terms, part);
    for (int r = 0; r < count; ++r) {
      const T scale = scales[n * height + r];
      if (scale == 0) continue;
      for (int v = 0; v < vectors; ++v) sum[r][v] = fma(scale, part[r][v], sum[r][v]);
    }
  }
  template <int vectors>
  void write(const Output& out, int p, const Sums<vectors>& sum) const {
    const int first = p * panel, columns = out.mul - first < panel ? out.mul - first : panel;
    const bool is_whole = components == 1 && columns == vectors * lanes;
    for (int r = 0; r < count; ++r) {
      T* z = maps.to + rows[r] * maps.map.out_dim + out.first + first * components + component[r];
      const T* sums = reinterpret_cast<const T*>(sum[r]);
      if (is_whole)
        for (int v = 0; v < vectors; ++v) *(UnalignedLane*)(z + v * lanes) = sum[r][v];
      else
        for (int u = 0; u < columns; ++u) z[u * components] = sums[u];
    }
  }
};

void launch(const eq_operands& o) {
  const Maps maps(o);
  const int64_t staged = int64_t(maps.map.most_staged) * height, scales = int64_t(maps.matrices) * height;
  const Scratch of_group(staged + scales, o.threads), used(cells(maps.matrices), o.threads);
  maps.map.find_order(o, maps.order, maps.present);
#pragma omp parallel num_threads(o.threads)
  {
    maps.fill_all();
    T* base = maps.packed;
    Group group{maps, of_group.own(), of_group.own() + staged, reinterpret_cast<int32_t*>(used.own())};
    for (int n = 0; n < maps.map.outputs; ++n) {
      const Output out = maps.map.output(n);
#pragma omp for schedule(static) nowait
      for (int64_t first = 0; first < o.num_edges * out.components; first += height) {
        group.take(out, first);
        group.stage(out);
        for (int p = 0; p * panel < out.mul; ++p) {
          if (out.mul - p * panel > lanes) group.multiply<2>(out, base, p);
          else group.multiply<1>(out, base, p);
        }
      }
      base += maps.output_size(out);
    }
  }
}

}  // namespace

#define EQ_EXPORT_LINEAR                                                                                               \
  extern "C" __attribute__((visibility("default"))) void eq_launch(const eq_operands* o) { launch(*o); }               \
                                                                                                                       \
  extern "C" __attribute__((visibility("default"))) int64_t eq_workspace_bytes(const eq_operands* o) {                 \
    return Maps(*o).bytes();                                                                                           \
  }

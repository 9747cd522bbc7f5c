// CPU prelude of linear maps: matrices of the attributes that occur are packed, and rows multiplied by them in groups.
//
// A group is some rows, in the order of their attributes, whose components are rows of a matrix; two SIMD vectors hold
// columns of a sum for each of these. What is read is laid out for that once a group, times the attribute, so that rows
// with others in the group add zeros.
#pragma once
#include "abi.h"
#include "cpu_lane.h"
#include "direction.h"
#include "linear.h"

#define EQ_TABLE constexpr

namespace {

constexpr int panel = 2 * lanes;  // columns of the packed matrices that are beside each other
constexpr int most_rows = EQ_SIMD_BYTES == 64 ? 12 : 6;  // as many sums as registers hold

template <class P>
struct Maps {
  static constexpr int matrices = P::attributes > 0 ? P::attributes : 1;
  const eq_operands& o;
  const T* from;
  T* to;
  T* packed;
  int32_t* order;
  int32_t* present;  // which attributes occur

  explicit Maps(const eq_operands& operands)
      : o(operands), from(static_cast<const T*>(has_gradient ? o.gz : o.x)),
        to(static_cast<T*>(has_gradient ? o.gx : o.z)), packed(static_cast<T*>(o.workspace)),
        order(reinterpret_cast<int32_t*>(packed + packed_size())), present(order + o.num_edges) {}

  static int64_t output_size(const Output& out) {
    int64_t terms = 0;
    for (int f = out.begin; f < out.end; ++f) terms += P::factor(f).terms;
    return terms * matrices * ((out.mul + panel - 1) / panel * panel);
  }
  static int64_t packed_size() {
    int64_t size = 0;
    for (int n = 0; n < P::outputs; ++n) size += output_size(P::output(n));
    return size;
  }
  static int64_t bytes(const eq_operands& o) {
    return packed_size() * sizeof(T) + (o.num_edges + matrices) * sizeof(int32_t);
  }

  T attribute(int64_t row, int z) const {
    if constexpr (P::attributes == 0) return 1;
    else return static_cast<const T*>(o.y)[row * P::attributes + z];
  }

  // Rows by their first attribute that is not zero, in their order otherwise.
  void find_order(int32_t* first, int32_t* places) const {
    for (int z = 0; z < matrices; ++z) present[z] = P::attributes == 0;
    for (int z = 0; z <= matrices + 1; ++z) places[z] = 0;
    for (int64_t row = 0; row < o.num_edges; ++row) {
      int key = P::attributes == 0 ? 0 : matrices;
      for (int z = P::attributes; z-- > 0;)
        if (attribute(row, z) != 0) present[key = z] = 1;
      first[row] = key;
      ++places[key + 1];
    }
    for (int z = 1; z <= matrices; ++z) places[z] += places[z - 1];
    for (int64_t row = 0; row < o.num_edges; ++row) order[places[first[row]]++] = row;
  }

  // The packed matrix of a factor and an attribute in a panel of an output; factors of a panel follow each other.
  T* pack(const Output& out, T* base, int p, int f, int z) const {
    int64_t terms = 0;
    for (int g = out.begin; g < f; ++g) terms += P::factor(g).terms;
    int64_t all = terms;
    for (int g = f; g < out.end; ++g) all += P::factor(g).terms;
    return base + ((all * p + terms) * matrices + int64_t(P::factor(f).terms) * z) * panel;
  }
  void fill(const Output& out, T* base, int p, int f) const {
    const Factor factor = P::factor(f);
    const int first = p * panel, count = out.mul - first < panel ? out.mul - first : panel;
    for (int z = 0; z < matrices; ++z) {
      if (!present[z]) continue;
      T* to_panel = pack(out, base, p, f, z);
      if (count < panel) memset(to_panel, 0, sizeof(T) * panel * factor.terms);
      for (int k = 0; k < factor.terms; ++k)
        for (int c = 0; c < count; ++c)
          to_panel[k * panel + c] = factor.coefficient * *factor.weights(o.w, z, k, first + c);
    }
  }
  void fill_all() const {
    T* base = packed;
    for (int n = 0; n < P::outputs; ++n) {
      const Output out = P::output(n);
      const int panels = (out.mul + panel - 1) / panel, count = out.end - out.begin;
#pragma omp for schedule(static)
      for (int job = 0; job < panels * count; ++job) fill(out, base, job / count, out.begin + job % count);
      base += output_size(out);
    }
  }
};

// Some rows and what they have in common; `staged` has the operands of all factors and attributes one after the other.
template <class P, int components>
struct Group {
  static constexpr int rows = components < most_rows ? most_rows / components : 1;
  static constexpr int height = rows * components;
  const Maps<P>& maps;
  const int32_t* order;
  int count;
  T* staged;
  int32_t* used;  // attributes that one of the rows has
  int num_used = 0;

  void find_used() {
    num_used = 0;
    for (int z = 0; z < Maps<P>::matrices; ++z) {
      bool any = false;
      for (int i = 0; i < count && maps.present[z]; ++i) any = any || maps.attribute(order[i], z) != 0;
      if (any) used[num_used++] = z;
    }
  }
  void stage(const Output& out) {
    T* next = staged;
    for (int f = out.begin; f < out.end; ++f) {
      const Factor factor = P::factor(f);
      for (int n = 0; n < num_used; ++n, next += factor.terms * height) {
        for (int i = 0; i < rows; ++i) {
          const int64_t row = order[i < count ? i : count - 1];
          const T scale = i < count ? maps.attribute(row, used[n]) : T(0);
          const T* from = maps.from + row * P::in_dim + factor.first;
          for (int k = 0; k < factor.terms; ++k)
            for (int c = 0; c < components; ++c)
              next[k * height + i * components + c] = scale * from[k * components + c];
        }
      }
    }
  }
  void multiply(const Output& out, T* base, int p) const {
    Lane sum[height][2] = {};
    const T* x = staged;
    for (int f = out.begin; f < out.end; ++f) {
      const int terms = P::factor(f).terms;
      for (int n = 0; n < num_used; ++n) {
        const T* w = maps.pack(out, base, p, f, used[n]);
        for (int k = 0; k < terms; ++k, x += height, w += panel) {
          const Lane left = *(const UnalignedLane*)w, right = *(const UnalignedLane*)(w + lanes);
#pragma GCC unroll 64
          for (int r = 0; r < height; ++r) {
            sum[r][0] = fma(x[r], left, sum[r][0]);
            sum[r][1] = fma(x[r], right, sum[r][1]);
          }
        }
      }
    }
    const int first = p * panel, columns = out.mul - first < panel ? out.mul - first : panel;
    for (int i = 0; i < count; ++i)
      for (int c = 0; c < components; ++c) {
        T* z = maps.to + int64_t(order[i]) * P::out_dim + out.first + first * components + c;
        const T* values = reinterpret_cast<const T*>(sum[i * components + c]);
        for (int u = 0; u < columns; ++u) z[u * components] = values[u];
      }
  }
};

template <class P>
void launch(const eq_operands& o) {
  const Maps<P> maps(o);
  const int64_t rows = o.num_edges;
  const auto cells = [](int64_t numbers) { return (numbers * sizeof(int32_t) + sizeof(T) - 1) / sizeof(T); };
  int components = 1;
  for (int n = 0; n < P::outputs; ++n)
    if (P::output(n).components > components) components = P::output(n).components;
  const int height = components > most_rows ? components : most_rows;
  const Scratch staged(int64_t(P::most_staged) * height, o.threads), used(cells(maps.matrices), o.threads);
  const Scratch sort(cells(rows + maps.matrices + 2), 1);
  int32_t* keys = reinterpret_cast<int32_t*>(sort.of(0));
  maps.find_order(keys, keys + rows);
#pragma omp parallel num_threads(o.threads)
  {
    maps.fill_all();
    T* base = maps.packed;
    for (int n = 0; n < P::outputs; ++n) {
      const Output out = P::output(n);
      P::with_components(out.components, [&](auto tag) {
        typedef Group<P, decltype(tag)::count> Of;
        Of group{maps, nullptr, 0, staged.own(), reinterpret_cast<int32_t*>(used.own())};
#pragma omp for schedule(static) nowait
        for (int64_t first = 0; first < rows; first += Of::rows) {
          group.order = maps.order + first;
          group.count = rows - first < Of::rows ? rows - first : Of::rows;
          group.find_used();
          group.stage(out);
          for (int p = 0; p * panel < out.mul; ++p) group.multiply(out, base, p);
        }
      });
      base += maps.output_size(out);
    }
  }
}

}  // namespace

#define EQ_EXPORT_LINEAR(P)                                                                                            \
  extern "C" __attribute__((visibility("default"))) void eq_launch(const eq_operands* o) { launch<P>(*o); }            \
                                                                                                                       \
  extern "C" __attribute__((visibility("default"))) int64_t eq_workspace_bytes(const eq_operands* o) {                 \
    return Maps<P>::bytes(*o);                                                                                         \
  }

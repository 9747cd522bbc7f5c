// CPU prelude of radial basis functions: a SIMD vector holds as many edges as it has elements.
#pragma once
#include "abi.h"
#include "cpu_lane.h"
#include "direction.h"
#include "cpu_elementary.h"

namespace {

// Operands of some edges, or their outputs: z and gz share a place, dx and dw are tangents.
template <class P>
struct Row {
  V x[1], w[P::w_dim + 1], z[P::z_dim], dx[1], dw[P::w_dim + 1];  // no array is empty
};

// Some edges of all; a vector past the last of them repeats it.
struct Range {
  int64_t first, count;

  // Rows of `dim` elements that are `stride` elements apart, which is zero where all edges have the same.
  template <int dim>
  EQ_FN void read(const void* rows, int64_t stride, V* values) const {
    alignas(64) T tile[dim][lanes];
    for (int u = 0; u < lanes; ++u) {
      const T* row = static_cast<const T*>(rows) + (first + (u < count ? u : count - 1)) * stride;
      for (int n = 0; n < dim; ++n) tile[n][u] = row[n];
    }
    for (int n = 0; n < dim; ++n) values[n] = *(const Lane*)tile[n];
  }
  template <int dim>
  EQ_FN void write(void* rows, const V* values) const {
    alignas(64) T tile[dim][lanes];
    for (int n = 0; n < dim; ++n) *(Lane*)tile[n] = values[n];
    for (int u = 0; u < count; ++u) {
      T* row = static_cast<T*>(rows) + (first + u) * dim;
      for (int n = 0; n < dim; ++n) row[n] = tile[n][u];
    }
  }
};

template <class P, class Run>
void launch_rows(const eq_operands& o, const Run& run) {
  const int64_t rows = o.num_edges;
  constexpr int k = P::w_dim;
#pragma omp parallel for schedule(static) num_threads(o.threads)
  for (int64_t first = 0; first < rows; first += lanes) {
    const Range range{first, rows - first < lanes ? rows - first : lanes};
    Row<P> in{}, out;
    range.read<1>(o.x, 1, in.x);
    if constexpr (k > 0) range.read<k>(o.w, o.w_stride, in.w);
    if (has_gradient) range.read<P::z_dim>(o.gz, P::z_dim, in.z);
    if (has_tangents) range.read<1>(o.a, 1, in.dx);
    if constexpr (has_tangents && k > 0)
      if (o.c) range.read<k>(o.c, o.c_stride, in.dw);
    run(in, out);
    if (writes_z) range.write<P::z_dim>(o.z, out.z);
    if (has_gradient) range.write<1>(o.gx, out.x);
    if constexpr (has_gradient && k > 0)
      if (o.gw) range.write<k>(o.gw, out.w);
  }
}

}  // namespace

#include "radial_basis.h"

#define EQ_EXPORT_ROWS(P)                                                                                              \
  extern "C" __attribute__((visibility("default"))) void eq_launch(const eq_operands* o) {                             \
    launch_rows<P>(*o, [](const Row<P>& in, Row<P>& out) { run_row(in, out); });                                       \
  }                                                                                                                    \
  extern "C" __attribute__((visibility("default"))) int64_t eq_workspace_bytes(const eq_operands*) { return 0; }

// CPU prelude of polynomials: a SIMD vector holds one column of as many rows as it has elements.
#pragma once
#include "abi.h"
#include "cpu_lane.h"
#include "direction.h"

namespace {

typedef Lane V;

// Operands of some rows, or their outputs: z and gz share a place, dx and dw are tangents.
template <class P>
struct Row {
  V x[P::x_dim], w[P::w_dim], z[P::z_dim], dx[P::x_dim], dw[P::w_dim];
};

// Some rows of all; a vector past the last of them repeats it.
struct Range {
  int64_t first, count;

  template <int dim>
  EQ_FN void read(const void* rows, V (&values)[dim]) const {
    alignas(64) T tile[dim][lanes];
    for (int u = 0; u < lanes; ++u) {
      const T* row = static_cast<const T*>(rows) + (first + (u < count ? u : count - 1)) * dim;
      for (int n = 0; n < dim; ++n) tile[n][u] = row[n];
    }
    for (int n = 0; n < dim; ++n) values[n] = *(const Lane*)tile[n];
  }
  template <int dim>
  EQ_FN void write(void* rows, const V (&values)[dim]) const {
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
#pragma omp parallel for schedule(static) num_threads(o.threads)
  for (int64_t first = 0; first < rows; first += lanes) {
    const Range range{first, rows - first < lanes ? rows - first : lanes};
    Row<P> in{}, out;
    range.read(o.x, in.x);
    range.read(o.w, in.w);
    if (has_gradient) range.read(o.gz, in.z);
    if (has_tangents) range.read(o.a, in.dx);
    if (has_tangents && o.c) range.read(o.c, in.dw);
    run(in, out);
    if (writes_z) range.write(o.z, out.z);
    if (has_gradient) range.write(o.gx, out.x);
    if (has_gradient) range.write(o.gw, out.w);
  }
}

}  // namespace

#define EQ_EXPORT_ROWS(P)                                                                                              \
  extern "C" __attribute__((visibility("default"))) void eq_launch(const eq_operands* o) {                             \
    launch_rows<P>(*o, [](const Row<P>& in, Row<P>& out) { run_row(in, out); });                                       \
  }                                                                                                                    \
  extern "C" __attribute__((visibility("default"))) int64_t eq_workspace_bytes(const eq_operands*) { return 0; }

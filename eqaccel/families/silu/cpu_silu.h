// CPU prelude of activations: `num_receivers` elements, a SIMD vector of them at a time.
#pragma once
#include "abi.h"
#include "cpu_lane.h"
#include "direction.h"
#include "cpu_elementary.h"

namespace {

EQ_FN V read_elements(const void* from, int64_t first, int64_t count) {
  const T* values = static_cast<const T*>(from) + first;
  if (count >= lanes) return (V) * (const UnalignedLane*)values;
  V read{};
  for (int u = 0; u < count; ++u) read[u] = values[u];
  return read;
}
EQ_FN void write_elements(void* to, int64_t first, int64_t count, V written) {
  T* values = static_cast<T*>(to) + first;
  if (count >= lanes) *(UnalignedLane*)values = written;
  else
    for (int u = 0; u < count; ++u) values[u] = written[u];
}

template <class Run>
void launch_elements(const eq_operands& o, const Run& run) {
  const int64_t size = o.num_receivers;
#pragma omp parallel for schedule(static) num_threads(o.threads)
  for (int64_t first = 0; first < size; first += lanes) {
    const int64_t left = size - first;
    V gz{}, a{}, z{}, gx{};
    const V x = read_elements(o.x, first, left);
    if (has_gradient) gz = read_elements(o.gz, first, left);
    if (has_tangents) a = read_elements(o.a, first, left);
    run(x, gz, a, z, gx);
    if (writes_z) write_elements(o.z, first, left, z);
    if (has_gradient) write_elements(o.gx, first, left, gx);
  }
}

}  // namespace

#include "silu.h"

#define EQ_EXPORT_ELEMENTS(P)                                                                                          \
  extern "C" __attribute__((visibility("default"))) void eq_launch(const eq_operands* o) {                             \
    launch_elements(*o, [](V x, V gz, V a, V& z, V& gx) { run_element<P>(x, gz, a, z, gx); });                         \
  }                                                                                                                    \
  extern "C" __attribute__((visibility("default"))) int64_t eq_workspace_bytes(const eq_operands*) { return 0; }

// CPU prelude of gates: a SIMD vector holds as many scalars of a row, or gates, as it has elements.
#pragma once
#include "abi.h"
#include "cpu_lane.h"
#include "direction.h"
#include "cpu_elementary.h"
#include "gate.h"

namespace {

struct Place {
  int64_t row;
  int number, count;  // of activations of a part: the first one, and how many
  EQ_FN int64_t of(int columns, int column, int step) const { return row * columns + column + number * step; }
  EQ_FN V read(const void* rows, int columns, int column, int step) const {
    const T* values = static_cast<const T*>(rows) + of(columns, column, step);
    if (step == 1 && count >= lanes) return (V) * (const UnalignedLane*)values;
    V read{};
    for (int u = 0; u < lanes && u < count; ++u) read[u] = values[u * step];
    return read;
  }
  EQ_FN void write(void* rows, int columns, int column, int step, V written) const {
    T* values = static_cast<T*>(rows) + of(columns, column, step);
    if (step == 1 && count >= lanes) *(UnalignedLane*)values = written;
    else
      for (int u = 0; u < lanes && u < count; ++u) values[u * step] = written[u];
  }
};

template <class P>
void launch_gate(const eq_operands& o) {
  const int64_t rows = o.num_receivers;
#pragma omp parallel for schedule(static) num_threads(o.threads)
  for (int64_t row = 0; row < rows; ++row)
    P::each_part([&](auto part) {
      typedef decltype(part) Part;
      for (int number = 0; number < Part::count; number += lanes)
        run_part<P, Part>(o, Place{row, number, Part::count - number});
    });
}

}  // namespace

#define EQ_EXPORT_GATE(P)                                                                                              \
  extern "C" __attribute__((visibility("default"))) void eq_launch(const eq_operands* o) { launch_gate<P>(*o); }       \
  extern "C" __attribute__((visibility("default"))) int64_t eq_workspace_bytes(const eq_operands*) { return 0; }

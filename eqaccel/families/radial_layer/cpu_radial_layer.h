// CPU prelude of radial layers: a SIMD vector holds as many columns of z of a row as it has elements.
#pragma once
#include "abi.h"
#include "cpu_lane.h"
#include "direction.h"
#include "cpu_elementary.h"
#include "activations.h"

namespace {

template <class P>
EQ_FN void run_layer(const eq_operands& o, int64_t row) {
  const T* const x = static_cast<const T*>(o.x) + row * P::inputs;
  const T* const w = static_cast<const T*>(o.w);
  V gx[P::inputs] = {};
  EQ_CHANNELS(c, P::outputs) {
    V sum{};
    for (int k = 0; k < P::inputs; ++k) sum = fma(x[k], load<P::outputs>(w + k * P::outputs, c), sum);
    const Curve f = silu_curve(T(P::scale) * sum);
    if constexpr (!has_gradient) {
      store<P::outputs>(static_cast<T*>(o.z) + row * P::outputs, c, T(P::factor) * f.value);
    } else {
      const V g =
          load<P::outputs>(static_cast<const T*>(o.gz) + row * P::outputs, c) * (T(P::factor * P::scale) * f.slope);
      for (int k = 0; k < P::inputs; ++k) gx[k] = fma(g, load<P::outputs>(w + k * P::outputs, c), gx[k]);
    }
  }
  if constexpr (has_gradient)
    for (int k = 0; k < P::inputs; ++k) {
      T total = 0;
      for (int u = 0; u < lanes; ++u) total += gx[k][u];
      static_cast<T*>(o.gx)[row * P::inputs + k] = total;
    }
}

}  // namespace

#define EQ_EXPORT_LAYER(P)                                                                                             \
  extern "C" __attribute__((visibility("default"))) void eq_launch(const eq_operands* o) {                             \
    const int64_t rows = o->num_receivers;                                                                             \
    _Pragma("omp parallel for schedule(static) num_threads(o->threads)") for (int64_t row = 0; row < rows; ++row)      \
        run_layer<P>(*o, row);                                                                                         \
  }                                                                                                                    \
  extern "C" __attribute__((visibility("default"))) int64_t eq_workspace_bytes(const eq_operands*) { return 0; }

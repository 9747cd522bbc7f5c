// CPU prelude: what a segment's edge() reads and writes where there are gradients, whose loop over channels is innermost.
#pragma once
#include "cpu_lane.h"
#include "direction.h"

namespace {

template <int d1, int mul>
struct XBlock {
  const T* x_rows[tangents];
  T* gx_rows[gradients];
  EQ_FN Lane x(int i, int c) const { return load<mul>(x_rows[0] + i * mul, c); }
  EQ_FN Lane a(int i, int c) const { return load<mul>(x_rows[1] + i * mul, c); }
  EQ_FN Lane p(int i, int c) const { return load<mul>(x_rows[2] + i * mul, c); }
  EQ_FN void add(int i, int c, Lane value) { add_to<mul>(gx_rows[0] + i * mul, c, value); }
  EQ_FN void add_a(int i, int c, Lane value) { add_to<mul>(gx_rows[1] + i * mul, c, value); }
  EQ_FN void flush() {}
};
template <int mul>
struct Weight {
  const W *w_row, *w_ahead;  // the row of a later edge is fetched meanwhile
  const T *c_rows[tangents], *c_ahead[tangents];  // from 1 on
  T* gw_rows[gradients];
  bool stream;
  // Of a path that takes several passes.
  alignas(EQ_SIMD_BYTES) T partial[gradients][(mul + lanes - 1) / lanes * lanes];
  EQ_FN Lane at(int c) const {
    __builtin_prefetch(w_ahead + c, 0, 2);
    return load<mul>(w_row, c);
  }
  template <int n>
  EQ_FN Lane row(int c) const {
    __builtin_prefetch(c_ahead[n] + c, 0, 2);
    return load<mul>(c_rows[n], c);
  }
  EQ_FN Lane tangent(int c) const { return row<1>(c); }
  EQ_FN Lane second_tangent(int c) const { return row<2>(c); }
  template <int n, bool first, bool last>
  EQ_FN void add_to_row(int c, Lane value) {
    if (!first) value = value + *(const Lane*)(partial[n] + c);
    if (!last) *(Lane*)(partial[n] + c) = value;
    else if (stream) stream_store(gw_rows[n] + c, value);
    else store<mul>(gw_rows[n], c, value);
  }
  template <bool first, bool last>
  EQ_FN void add(int c, Lane value) {
    add_to_row<0, first, last>(c, value);
  }
  template <bool first, bool last>
  EQ_FN void add_c(int c, Lane value) {
    add_to_row<1, first, last>(c, value);
  }
  EQ_FN void flush() {}
};
// The rows of one edge, and the weights of one that comes later.
struct EdgeRows {
  const T* x[tangents];
  const W *w, *w_ahead;
  const T *c[tangents], *c_ahead[tangents];  // of tangents of w, from 1 on
  const T* gz[gradients];
  T *gx[gradients], *gy[gradients], *gw[gradients], *ggz;
  bool stream;
  template <int d1, int mul>
  EQ_FN XBlock<d1, mul> x_block(int offset) const {
    XBlock<d1, mul> block;
    for (int t = 0; t < tangents; ++t) block.x_rows[t] = x[t] + offset;
    for (int n = 0; n < gradients; ++n) block.gx_rows[n] = gx[n] + offset;
    return block;
  }
  template <int mul>
  EQ_FN Weight<mul> weight(int offset) const {
    // Whole vectors only, and only where the weights of other paths before these leave them aligned.
    const bool whole = mul % lanes == 0 && offset % lanes == 0;
    Weight<mul> weight;
    weight.w_row = w + offset;
    weight.w_ahead = w_ahead + offset;
    for (int t = 1; t < tangents; ++t) {
      weight.c_rows[t] = c[t] + offset;
      weight.c_ahead[t] = c_ahead[t] + offset;
    }
    for (int n = 0; n < gradients; ++n) weight.gw_rows[n] = gw[n] + offset;
    weight.stream = stream && whole;
    return weight;
  }
  template <int mul>
  EQ_FN Lane g(int, int offset, int channel) const {
    return load<mul>(gz[0] + offset, channel);
  }
  template <int mul>
  EQ_FN Lane tangent_g(int, int offset, int channel) const {
    return load<mul>(gz[1] + offset, channel);
  }
  template <int mul>
  EQ_FN Lane z(int, int offset, int channel) const {
    return load<mul>(ggz + offset, channel);
  }
  template <int mul>
  EQ_FN void set_z(int, int offset, int channel, Lane value) const {
    store<mul>(ggz + offset, channel, value);
  }
};

}  // namespace

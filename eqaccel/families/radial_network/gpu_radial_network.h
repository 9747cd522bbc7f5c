// GPU prelude of radial networks: a warp takes 16 rows from the first layer to the last, and for the gradient back again,
// and keeps their features in registers. Weights are in shared memory, as heads and tails (halves.h), and serve for both.
//
// What a multiplication gives is what the next one takes: with g = lane / 4 and t = lane % 4, a lane has of 16 x 8 sums
// columns 2 t and 2 t + 1, in rows g and g + 8, and gives them to the next multiplication as terms 2 t and 2 t + 1. Columns
// of layers are filled up with zeros to a multiple of the terms that a multiplication has.
//
// What activations and their arguments are multiplied by is in the weights, but for the last activation.
#pragma once
#include "abi.h"
#include "direction.h"
#include "halves.h"
#include "machine.h"

namespace {

constexpr int warp_rows = 16, terms_at_once = 16, columns_at_once = 8;  // of a multiplication
constexpr int padding = 8;  // halves behind a row of weights, so that eight rows lie in different banks

// Columns of sixteen rows: of eight at a time those of a lane in row g, then those in row g + 8.
template <int width>
struct Rows {
  float v[width / columns_at_once][4] = {};
};

EQ_FN constexpr int padded(int width) { return (width + terms_at_once - 1) / terms_at_once * terms_at_once; }

// Halves in shared memory of the weights of a layer, of which there are two parts.
template <class P>
EQ_FN constexpr int part_size(int layer) {
  return padded(P::width(layer)) * (padded(P::width(layer + 1)) + padding);
}
template <class P>
EQ_FN constexpr int weights_before(int layer) {
  int halves = 0;
  for (int n = 0; n < layer; ++n) halves += 2 * part_size<P>(n);
  return halves;
}

// SiLU and its slope by the approximations of the hardware: these are off by some units of the last place and by as much
// as if x were off by one, and sums are off by more.
struct Activated {
  float value, slope;
  EQ_FN explicit Activated(float x) {
    constexpr float log2_of_e = 1.4426950408889634f;
    const float s = reciprocal_approx(1 + exp2_approx(-log2_of_e * x));
    value = x * s;
    slope = fmaf(value, 1 - s, s);
  }
};

template <class P>
struct Network {
  static constexpr float last_factor = P::factor(P::layers - 1);
  const eq_operands& o;
  const unsigned short* weights;  // in shared memory
  const float* down;  // there too: what products with those of each layer are multiplied by
  int lane;
  unsigned first;  // row of the warp

  // Sums of a layer, or of its transpose.
  template <int layer, bool back>
  EQ_FN auto multiply(const Rows<padded(P::width(layer + back))>& a) const {
    constexpr int terms = padded(P::width(layer + back)), columns = padded(P::width(layer + !back));
    constexpr int stride = padded(P::width(layer + 1)) + padding, steps = terms / terms_at_once;
    float scales[2];
    unsigned heads[steps][4], tails[steps][4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float largest = 0;
#pragma unroll
      for (const auto& four : a.v) largest = fmaxf(largest, fmaxf(fabsf(four[2 * n]), fabsf(four[2 * n + 1])));
      const Scale scale = scale_of(largest_across(largest_across(largest, 1), 2));
      scales[n] = scale.down * down[layer];
#pragma unroll
      for (int i = 0; i < 2 * steps; ++i) {
        const Split<2> split(scale.up * a.v[i][2 * n], scale.up * a.v[i][2 * n + 1]);
        heads[i / 2][i % 2 * 2 + n] = split.part[0], tails[i / 2][i % 2 * 2 + n] = split.part[1];
      }
    }
    // A lane says where a row of weights is, of the first and the last eight terms, of heads and of tails.
    const int eight = lane / 8 % 2 * 8, part = lane / 16 * part_size<P>(layer), row = lane % 8;
    const unsigned short* const from =
        weights + weights_before<P>(layer) + part + (back ? row * stride + eight : (row + eight) * stride);
    constexpr int tiles = columns / columns_at_once;
    float large[tiles][4] = {}, small[tiles][4] = {};
#pragma unroll
    for (int step = 0; step < steps; ++step)
#pragma unroll
      for (int n = 0; n < tiles; ++n) {
        const int column = n * columns_at_once, term = step * terms_at_once;
        unsigned b[4];
        read_matrices<!back>(b, from + (back ? column * stride + term : term * stride + column));
        const unsigned (&head)[2] = {b[0], b[1]}, (&tail)[2] = {b[2], b[3]};
        multiply_add(small[n], tails[step], head, small[n]);
        multiply_add(small[n], heads[step], tail, small[n]);
        multiply_add(large[n], heads[step], head, large[n]);
      }
    Rows<columns> sums;
#pragma unroll
    for (int n = 0; n < tiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums.v[n][i] = (large[n][i] + small[n][i]) * scales[i / 2];
    return sums;
  }

  // Two neighbours of each eight columns that are there, in a row: where they are in memory, and among what a lane has.
  template <int dim, class F>
  EQ_FN void each_pair(const F& run) const {
#pragma unroll
    for (int n = 0; n < padded(dim) / columns_at_once; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const unsigned row = first + lane / 4 + 8 * half;
        const int column = n * columns_at_once + lane % 4 * 2;
        if (row < unsigned(o.num_receivers) && column < dim)
          run(int64_t(row) * dim + column, n, 2 * half, column + 1 < dim);
      }
  }
  template <int dim>
  EQ_FN Rows<padded(dim)> read(const void* rows) const {
    Rows<padded(dim)> values;
    each_pair<dim>([&](int64_t place, int n, int i, bool both) {
      const float* const at = static_cast<const float*>(rows) + place;
      float2 two;
      if constexpr (dim % 2 == 0) two = *reinterpret_cast<const float2*>(at);
      else two = {at[0], both ? at[1] : 0};
      values.v[n][i] = two.x, values.v[n][i + 1] = two.y;
    });
    return values;
  }
  template <int dim>
  EQ_FN void write(void* rows, const Rows<padded(dim)>& values) const {
    each_pair<dim>([&](int64_t place, int n, int i, bool both) {
      float* const at = static_cast<float*>(rows) + place;
      const float2 two = {values.v[n][i], values.v[n][i + 1]};
      if constexpr (dim % 2 == 0) {
        *reinterpret_cast<float2*>(at) = two;
      } else {
        at[0] = two.x;
        if (both) at[1] = two.y;
      }
    });
  }

  // From the features that a layer is given to the output.
  template <int layer>
  EQ_FN void forward(const Rows<padded(P::width(layer))>& given) const {
    constexpr bool is_last = layer + 1 == P::layers;
    auto z = multiply<layer, false>(given);
#pragma unroll
    for (auto& four : z.v)
#pragma unroll
      for (float& x : four) x = (is_last ? last_factor : 1) * Activated(x).value;
    if constexpr (is_last) write<P::width(P::layers)>(o.z, z);
    else forward<layer + 1>(z);
  }

  // Sums of a layer become the slopes of its activation; gives its features.
  template <int layer>
  EQ_FN auto activate(Rows<padded(P::width(layer + 1))>& sums) const {
    auto features = sums;
#pragma unroll
    for (int n = 0; n < padded(P::width(layer + 1)) / columns_at_once; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Activated f(sums.v[n][i]);
        features.v[n][i] = f.value;
        sums.v[n][i] = (layer + 1 == P::layers ? last_factor : 1) * f.slope;
      }
    return features;
  }

  // The gradient of the features that a layer is given.
  template <int layer>
  EQ_FN auto backward(const Rows<padded(P::width(layer))>& given) const {
    constexpr int width = P::width(layer + 1);
    auto slopes = multiply<layer, false>(given);
    const auto features = activate<layer>(slopes);
    Rows<padded(width)> gz;
    if constexpr (layer + 1 < P::layers) gz = backward<layer + 1>(features);
    else gz = read<width>(o.gz);
    // The first of many layers has few terms: making it again costs less than registers for its slopes.
    if constexpr (layer == 0 && P::layers > 2) {
      slopes = multiply<layer, false>(given);
      activate<layer>(slopes);
    }
#pragma unroll
    for (int n = 0; n < padded(width) / columns_at_once; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) gz.v[n][i] *= slopes.v[n][i];
    return multiply<layer, true>(gz);
  }

  EQ_FN void run() const {
    const auto x = read<P::width(0)>(o.x);
    if constexpr (has_gradient) write<P::width(0)>(o.gx, backward<0>(x));
    else forward<0>(x);
  }
};

// The weights of a layer and of those after it, on their way to shared memory.
template <class P, int layer = 0>
struct Weights {
  static constexpr int warps = P::block_threads / 32, outputs = P::width(layer + 1), pairs = padded(outputs) / 2;
  static constexpr int size = P::width(layer) * outputs, filled_size = padded(P::width(layer)) * pairs;
  const float* from;

  // Two neighbours of a row, times all that features and sums are multiplied by; zeros beyond the last.
  EQ_FN float2 pair(int n) const {
    constexpr float factor = P::scale(layer) * (layer == 0 ? 1 : P::factor(layer == 0 ? 0 : layer - 1));
    const int row = n / pairs, column = n % pairs * 2;
    if (row >= P::width(layer) || column >= outputs) return {0, 0};
    const float* const at = from + row * outputs + column;
    return {factor * at[0], factor * at[1]};
  }

  // The largest of each warp.
  EQ_FN void find_largest(float (&largest)[P::layers][warps]) const {
    float found = 0;
    for (int n = threadIdx.x; n < filled_size; n += P::block_threads) {
      const float2 two = pair(n);
      found = fmaxf(found, fmaxf(fabsf(two.x), fabsf(two.y)));
    }
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) found = largest_across(found, mask);
    if (threadIdx.x % 32 == 0) largest[layer][threadIdx.x / 32] = found;
    if constexpr (layer + 1 < P::layers) Weights<P, layer + 1>{from + size}.find_largest(largest);
  }

  EQ_FN void copy(const float (&largest)[P::layers][warps], unsigned short* to, float* down) const {
    float found = 0;
#pragma unroll
    for (int n = 0; n < warps; ++n) found = fmaxf(found, largest[layer][n]);
    const Scale scale = scale_of(found);
    if (threadIdx.x == 0) down[layer] = scale.down;
    for (int n = threadIdx.x; n < filled_size; n += P::block_threads) {
      const float2 two = pair(n);
      const Split<2> split(scale.up * two.x, scale.up * two.y);
      unsigned short* const at = to + n / pairs * (2 * pairs + padding) + n % pairs * 2;
#pragma unroll
      for (int part = 0; part < 2; ++part)
        *reinterpret_cast<unsigned*>(at + part * part_size<P>(layer)) = split.part[part];
    }
    if constexpr (layer + 1 < P::layers)
      Weights<P, layer + 1>{from + size}.copy(largest, to + 2 * part_size<P>(layer), down);
  }
};

template <class P>
EQ_FN void run_network(const eq_operands& o) {
  constexpr int warps = P::block_threads / 32;
  __shared__ __align__(16) unsigned short weights[weights_before<P>(P::layers)];
  __shared__ float largest[P::layers][warps], down[P::layers];
  const Weights<P> all{static_cast<const float*>(o.w)};
  all.find_largest(largest);
  __syncthreads();
  all.copy(largest, weights, down);
  __syncthreads();
  const unsigned rows = unsigned(o.num_receivers), step = gridDim.x * warps * warp_rows;  // fewer than 2^31
#pragma unroll 1
  for (unsigned first = (blockIdx.x * warps + threadIdx.x / 32) * warp_rows; first < rows; first += step)
    Network<P>{o, weights, down, int(threadIdx.x % 32), first}.run();
}

}  // namespace

// csrc/runtime/row_kernel.cpp launches it.
#define EQ_EXPORT_NETWORK(P)                                                                                           \
  EQ_KERNEL void __launch_bounds__(P::block_threads, P::resident) eq_rows(const EQ_PARAMETER eq_operands o) {          \
    run_network<P>(o);                                                                                                 \
  }

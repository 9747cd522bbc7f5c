// CPU prelude: the two layouts of a block of a row, (mul, 2l+1) and (2l+1, mul), and the way from one to the other.
#pragma once
#include <type_traits>

#include "cpu_lane.h"

namespace {

typedef std::conditional<sizeof(T) == 4, int32_t, int64_t>::type LaneNumber;
typedef LaneNumber LaneNumbers __attribute__((vector_size(EQ_SIMD_BYTES)));

// ---- layouts of a block

// How `lanes` channels of `dim` neighbouring components, in as many vectors, become components, and the way back: each
// result is the first vector, of which all others in turn replace some lanes. Two vectors take a shuffle with AVX-512, and
// some instructions with AVX2, where as many elements one by one take no longer if components are many.
#if defined(__GNUC__) && !defined(__clang__)
constexpr int most_components = EQ_SIMD_BYTES == 64 ? 9 : EQ_SIMD_BYTES == 32 && sizeof(T) == 4 ? 5 : 1;
#else
constexpr int most_components = 1;  // there shuffles are in the text of a program
#endif

// Built when the kernel is loaded: compilers would take longer for constants than for the rest of a small kernel.
class LayoutShuffles {
 public:
  LayoutShuffles() {
    for (int dim = 3; dim <= most_components; dim += 2)
      for (int result = 0; result < dim; ++result)
        for (int next = 1; next < dim; ++next)
          for (int n = 0; n < lanes; ++n) {
            const int channel = n * dim + result, component = result * lanes + n, at = result * (dim - 1) + next - 1;
            components_[dim][at][n] = chosen(channel / lanes, channel % lanes, next, n);
            channels_[dim][at][n] = chosen(component % dim, component / dim, next, n);
          }
  }
  const LaneNumbers* to_components(int dim) const { return components_[dim]; }
  const LaneNumbers* to_channels(int dim) const { return channels_[dim]; }

 private:
  // Where lane n is, which is lane `lane` of the vector `vector`, when the vector `next` joins those before it.
  static int chosen(int vector, int lane, int next, int n) {
    return vector == next ? lanes + lane : vector == 0 && next == 1 ? lane : n;
  }
  typedef LaneNumbers Shuffles[most_components + 1][most_components * most_components];
  Shuffles components_, channels_;
};
const LayoutShuffles layout_shuffles;

// (mul, dim) to (dim, mul), whose components begin `stride` elements apart.
inline void to_components(const T* __restrict__ in, int mul, int dim, T* __restrict__ out, int stride) {
  int u = 0;
#if !defined(__clang__)
  for (; 1 < dim && dim <= most_components && u + lanes <= mul; u += lanes) {
    const LaneNumbers* shuffle = layout_shuffles.to_components(dim);
    const UnalignedLane* const from = (const UnalignedLane*)(in + u * dim);
    for (int i = 0; i < dim; ++i) {
      Lane found = from[0];
      for (int m = 1; m < dim; ++m) {
        const Lane next = from[m];
        found = __builtin_shuffle(found, next, *shuffle++);
      }
      *(UnalignedLane*)(out + i * stride + u) = found;
    }
  }
#endif
  for (; u < mul; ++u)
    for (int i = 0; i < dim; ++i) out[i * stride + u] = in[u * dim + i];
}
// Back; with `adds` it is added to what is there.
template <bool adds>
void to_channels(const T* __restrict__ in, int stride, int mul, int dim, T* __restrict__ out) {
  int u = 0;
#if !defined(__clang__)
  for (; 1 < dim && dim <= most_components && u + lanes <= mul; u += lanes) {
    const LaneNumbers* shuffle = layout_shuffles.to_channels(dim);
    UnalignedLane* const to = (UnalignedLane*)(out + u * dim);
    for (int m = 0; m < dim; ++m) {
      Lane found = *(const UnalignedLane*)(in + u);
      for (int i = 1; i < dim; ++i) {
        const Lane next = *(const UnalignedLane*)(in + i * stride + u);
        found = __builtin_shuffle(found, next, *shuffle++);
      }
      to[m] = adds ? to[m] + found : found;
    }
  }
#endif
  for (; u < mul; ++u)
    for (int i = 0; i < dim; ++i) {
      T& to = out[u * dim + i];
      to = adds ? to + in[i * stride + u] : in[i * stride + u];
    }
}

}  // namespace

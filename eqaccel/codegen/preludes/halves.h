// Floats as tensor cores get them, which multiply halves: numbers of 11 bits, between 2^-24 and 2^16.
//
// A power of two brings floats into that range, the largest of them to 2^14 or above. Each then is the sum of two halves,
// head and tail, to within 2^-22 of itself, or 2^-39 of the largest one; so head head + head tail + tail head is a product
// to within 2^-20, but for what is lost beside the largest.
#pragma once
#include "tensor_core.h"

namespace {

// The largest of what the lanes of a warp have whose numbers differ in the bits of a mask: 1, 2, 4, 8 or 16.
EQ_FN float largest_across(float x, int mask) { return fmaxf(x, shuffle_xor(x, mask)); }

// Powers of two, one the inverse of the other: that which brings numbers into the range of halves, and that back.
struct Scale {
  float up, down;
};

// Of numbers none of which is larger. Those below 2^-112 are brought up as far as the inverse is still a normal number:
// the smallest float becomes the smallest half.
EQ_FN Scale scale_of(float largest) {
  constexpr unsigned one = 1 << 23;  // in the exponent of a float
  const unsigned exponent = max(__float_as_uint(largest) & 255 * one, 15 * one);
  return {__uint_as_float(268 * one - exponent), __uint_as_float(exponent - 14 * one)};
}

// What is multiplied of two neighbouring terms.
template <int parts>
struct Split {
  unsigned part[parts];  // heads, then tails

  EQ_FN Split(float first, float second) {
    part[0] = halves_of(first, second);
    if constexpr (parts == 2) {
      const float2 heads = floats_of(part[0]);
      part[1] = halves_of(first - heads.x, second - heads.y);
    }
  }
};

}  // namespace

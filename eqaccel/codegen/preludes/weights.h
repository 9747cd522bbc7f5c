// How weights are in memory: in the type of everything else or, where a text begins with EQ_BFLOAT16_WEIGHTS, as bfloat16
// in kernels of float32 that have no tangents. What reads them gets a float.
#pragma once
#include "direction.h"

namespace {

// The upper half of a float.
struct Bfloat16 {
  unsigned short bits;
};

template <class S, bool rounded>
struct WeightOf {
  typedef S type;
};
template <>
struct WeightOf<float, true> {
  typedef Bfloat16 type;
};

#ifdef EQ_BFLOAT16_WEIGHTS
typedef WeightOf<EQ_SCALAR, !has_tangents>::type W;
#else
typedef EQ_SCALAR W;
#endif

}  // namespace

// What the lanes of a warp can do together, in the machine's own words. A payload has one of the two.
#pragma once
#ifdef __HIP__
#include "warp_hip.h"
#else
#include "warp_cuda.h"
#endif

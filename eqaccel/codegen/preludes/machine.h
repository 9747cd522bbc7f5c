// What the GPU preludes need of the machine, in its own words. A payload has one of the two.
#pragma once
#ifdef __HIP__
#include "hip.h"
#else
#include "cuda.h"
#endif

// The kernels of matrix products on tensor cores: `wgmma_product.h` for compute capability 9.0, `mma_product.h` elsewhere.
#pragma once
#include "mma_product.h"
#include "wgmma_product.h"

#pragma once
#include "gpu.h"
#include "pairs.h"

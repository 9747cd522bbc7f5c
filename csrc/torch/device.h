// The GPU that torch drives, found at run time: this library links neither CUDA nor ROCm.
#pragma once
#include <c10/core/Device.h>

#include "program.h"

namespace eqaccel {

// cpu, or for a CUDA device cuda or hip, whichever this torch was built for (ROCm builds call their devices "cuda").
Backend backend_of(c10::Device);
// torch's current stream on a device; null on the CPU.
void* current_stream(c10::Device);
// Whether that stream records a graph, so that nothing may wait for it; no on the CPU.
bool is_capturing(c10::Device);

}  // namespace eqaccel

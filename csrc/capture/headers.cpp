// Compiles where CUDA's headers are complete: they come in several wheels. Only tried, part of no library.
#include <cuda.h>
#include <cuda_runtime.h>

int cuda_version() { return CUDART_VERSION; }

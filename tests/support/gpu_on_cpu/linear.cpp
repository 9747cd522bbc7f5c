// A kernel of linear maps for a direction on a CPU, as a library; "body.h" is the body, and EQ_LINEAR the kernel's name.
#include "abi.h"
#include "machine.h"
#include "warp_machine.h"

#define EQ_PARAMETER
#define EQ_RESIDENT(blocks) (blocks)
#define __constant__
#undef __shared__
#define __shared__ static  // one for all threads

namespace {

void copy_16_bytes(T* to, const T* from) {
  const Unwatched scope;
  Copy& copy = gpu_block.current().begun.emplace_back(Copy{reinterpret_cast<float*>(to), {}});
  std::memcpy(copy.four, from, sizeof(copy.four));
}
void copy_element(T* to, const T* from) { *to = *from; }
void atomicMin(int* to, int value) { *to = std::min(*to, value); }
void atomicMax(int* to, int value) { *to = std::max(*to, value); }
void atomicOr(unsigned* to, unsigned value) { *to |= value; }

}  // namespace

#include "gpu_linear.h"

#include "body.h"

extern "C" void run(const T* x, const T* y, const T* w, const T* gz, T* z, T* gx, int rows, int blocks, int threads) {
  eq_operands o{};
  o.x = x, o.y = y, o.w = w, o.gz = gz, o.z = z, o.gx = gx;
  o.num_edges = rows;
  launch(unsigned(blocks), unsigned(threads), [&] { EQ_LINEAR(o); });
}

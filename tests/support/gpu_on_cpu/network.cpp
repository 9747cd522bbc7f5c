// The kernel of radial networks for a direction on a CPU, as a library; "body.h" is the body.
#include "abi.h"
#include "machine.h"

#define EQ_PARAMETER
#undef __shared__
#define __shared__ static  // one for all threads

#include "gpu_radial_network.h"

#include "body.h"

extern "C" void run(const float* x, const float* w, const float* gz, float* z, float* gx, int rows, int blocks) {
  eq_operands o{};
  o.x = x, o.w = w, o.gz = gz, o.z = z, o.gx = gx;
  o.num_receivers = rows;
  launch(unsigned(blocks), Problem::block_threads, [&] { eq_rows(o); });
}

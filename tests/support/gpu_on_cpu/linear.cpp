// A kernel of linear maps for a direction on a CPU, as a library; "body.h" is the body, and EQ_LINEAR the kernel's name.
#include "linear_words.h"

#include "gpu_linear.h"

#include "body.h"

extern "C" void run(const T* x, const T* y, const T* w, const T* gz, T* z, T* gx, int rows, int blocks, int threads) {
  eq_operands o{};
  o.x = x, o.y = y, o.w = w, o.gz = gz, o.z = z, o.gx = gx;
  o.num_edges = rows;
  launch(unsigned(blocks), unsigned(threads), [&] { EQ_LINEAR(o); });
}

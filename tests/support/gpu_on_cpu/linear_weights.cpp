// The kernels of the derivative of linear maps by weights on a CPU, as a library; "body.h" is the body.
#include "linear_words.h"

#include "gpu_linear_weights.h"

#include "body.h"

// `sums`: room for the weights of each part, of which there are several.
extern "C" void run(const T* x, const T* y, const T* gz, T* gw, T* sums, int rows, int squares, int parts) {
  eq_operands o{};
  o.x = x, o.y = y, o.gz = gz, o.gw = gw, o.workspace = sums;
  o.num_edges = rows;
  launch(unsigned(squares * parts), weight_threads, [&] { eq_linear_weights(o, squares, parts); });
  if (parts == 1) return;
  launch(unsigned((Problem::weights + weight_threads - 1) / weight_threads), weight_threads,
         [&] { eq_linear_weights_sum(o, parts); });
}

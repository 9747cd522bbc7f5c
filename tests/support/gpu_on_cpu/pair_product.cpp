// The kernel of a product of any mode for a direction on threads of a CPU, as a library; "body.h" is the body.
#include "bulk_copy.h"

#include "gpu_pairs.h"

#include "body.h"

// Runs as many blocks, and returns how many bytes behind the shared memory of a block have changed.
extern "C" int run(const eq_operands* o, const eq_work_split* split, int blocks, bool late) {
  copies_are_late = late;
  launch(unsigned(blocks), warp, [&] {
    if (threadIdx.x == 0) begin_block();
    __syncthreads();
    eq_main_0(*o, *split);
  });
  int changed = 0;
  for (std::size_t n = Launch::shared_bytes; n < sizeof(shared); ++n) changed += shared[n] != untouched;
  return changed;
}

// Ghost rows of node features in a simulation that is spread over ranks: what an MD engine implements.
//
// The operator eqaccel::exchange takes a handle, the address of a GhostExchange as an integer, so that a TorchScript
// model can carry it as an argument. Plain C++: an engine's plugin includes this file and links nothing for it.
// On a GPU `reverse` is called from torch's autograd thread while the caller of the model waits: one call at a time, but
// not always on one thread.
#pragma once
#include <cstdint>

namespace eqaccel {

class GhostExchange {
 public:
  virtual ~GhostExchange() = default;
  // `rows` is (num_nodes, width) in host memory, contiguous, double or float; nodes of this rank come first. Fills the
  // rows of the ghosts from the ranks that own them. There may be rows behind those of the ghosts, which are left alone.
  // Without nodes `rows` is null; the call is made all the same.
  virtual void forward(void* rows, int64_t num_nodes, int64_t width, bool is_double) = 0;
  // Adds the rows of the ghosts to the rows of their owners, on whatever rank these are.
  virtual void reverse(void* rows, int64_t num_nodes, int64_t width, bool is_double) = 0;
};

}  // namespace eqaccel

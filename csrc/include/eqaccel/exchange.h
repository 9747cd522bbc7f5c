// Ghost rows of node features in a simulation that is spread over ranks: what an MD engine implements.
//
// The operator eqaccel::exchange takes a handle, the address of a GhostExchange as an integer, so that a TorchScript
// model can carry it as an argument. Plain C++: an engine's plugin includes this file and links nothing for it.
// On a GPU `reverse` is called from torch's autograd thread while the caller of the model waits: one call at a time, but
// not always on one thread.
#pragma once
#include <cstdint>

namespace eqaccel {

// Which nodes of a rank are in messages, the same in all exchanges of a step. The local nodes come first, then the ghosts,
// and there may be nodes behind these, which are in no message.
struct GhostNodes {
  int64_t num_ghosts = 0;
  int64_t num_messages = 0;  // to ranks that have nodes of this one as ghosts
  const int64_t* ends = nullptr;  // (num_messages) where each message ends in `sent`
  const int64_t* sent = nullptr;  // local nodes, message after message; in none twice

  int64_t num_sent() const { return num_messages > 0 ? ends[num_messages - 1] : 0; }
};

// Rows are in host memory, contiguous, double or float. Without rows the address may be null; the call is made all the
// same, because other ranks wait for it.
class GhostExchange {
 public:
  virtual ~GhostExchange() = default;
  // Those of the step under way; what it points to is there until the next one. Called on any thread.
  virtual void nodes(GhostNodes& nodes) const = 0;
  // `rows` (num_sent, width) are of the nodes that are sent. Fills `ghost_rows` (num_ghosts, width) from the ranks that own
  // them.
  virtual void forward(const void* rows, void* ghost_rows, int64_t width, bool is_double) = 0;
  // The way back: fills `rows` (num_sent, width) with what the ranks that they are sent to have in `ghost_rows` for them.
  virtual void reverse(const void* ghost_rows, void* rows, int64_t width, bool is_double) = 0;
};

}  // namespace eqaccel

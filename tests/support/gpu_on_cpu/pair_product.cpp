// The kernel of a product of any mode for a direction on a CPU, as a library; "body.h" is the body.
#include "bulk_copy.h"

#include "gpu_pairs.h"

#include "body.h"

// Runs a batch, or a graph, whose gradients of x stand by slots. `operands`: x, y, w, gz, a, b and c; `results`: z, gx, gy
// and gw; `index`: row_ptr, edge and sender, or nothing; `part`: about how many slots a block has, or 0 if it has those of
// a receiver. Returns how many bytes behind the shared memory of a block have changed.
extern "C" int run(const void* const* operands, void* const* results, const int32_t* const* index, int receivers,
                   int senders, int edges, int part, bool mul_ir, bool late) {
  eq_operands o{};
  o.x = operands[0], o.y = operands[1], o.w = operands[2], o.gz = operands[3];
  o.a = operands[4], o.b = operands[5], o.c = operands[6];
  o.z = results[0], o.gx = o.workspace = results[1], o.gy = results[2], o.gw = results[3];
  o.row_ptr = index[0], o.edge = index[1], o.sender = index[2];
  o.num_receivers = receivers, o.num_senders = senders, o.num_edges = edges;
  o.w_stride = o.c_stride = Problem::w_dim;
  o.mul_ir = mul_ir, o.deterministic = 1;
  constexpr int far = 1 << 20;  // more slots than a row has
  eq_work_split split{};
  split.last = edges;
  split.size = part;
  split.longest = o.row_ptr ? far : 0;
  split.cut = o.row_ptr ? far : part;

  copies_are_late = late;
  launch(unsigned(part > 0 ? (edges + part - 1) / part : receivers), warp, [&] {
    if (threadIdx.x == 0) begin_block();
    __syncthreads();
    eq_main_0(o, split);
  });
  int changed = 0;
  for (std::size_t n = Launch::shared_bytes; n < sizeof(shared); ++n) changed += shared[n] != untouched;
  return changed;
}

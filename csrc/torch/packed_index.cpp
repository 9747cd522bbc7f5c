#include "packed_index.h"

#include <ATen/ATen.h>
#include <c10/core/TensorImpl.h>

#include <mutex>
#include <optional>
#include <utility>

#include "device.h"

namespace eqaccel {
namespace {

using at::Tensor;
using Nodes = std::pair<int64_t, int64_t>;  // receivers and senders

// Lies with a tensor and goes where torch takes the tensor itself: into what autograd saves, through detach.
struct Note : c10::BackendMeta {
  Note(Nodes nodes, int64_t version) : nodes(nodes), version(version) {}
  const Nodes nodes;
  const int64_t version;  // of the tensor, which may be filled with another graph later
};

// Threads that share a graph may use it for the first time together.
std::mutex notes;

std::optional<Nodes> noted(const Tensor& packed) {
  if (packed.is_cpu() || packed.is_inference()) return std::nullopt;  // read at once, or with changes not counted
  const std::lock_guard<std::mutex> lock(notes);
  const auto* note = dynamic_cast<const Note*>(packed.unsafeGetTensorImpl()->get_backend_meta());
  if (note == nullptr || note->version != packed._version()) return std::nullopt;
  return note->nodes;
}

Nodes read(const Tensor& packed) {
  const Tensor head = packed.is_cpu() ? packed : packed.narrow(0, 0, 2).to(at::kCPU);  // waits for a GPU
  const int32_t* values = head.const_data_ptr<int32_t>();
  return {values[0], values[1]};
}

}  // namespace

Compacted compacted(const at::Tensor& values, const at::Tensor& chosen, int64_t room) {
  const at::Tensor before = at::constant_pad_nd(chosen.cumsum(0, at::kInt), {1, 0});
  // Others are put behind the end, and cut off.
  const at::Tensor place = at::where(chosen, before.narrow(0, 0, values.size(0)), room).to(at::kLong);
  return {at::zeros({room + 1}, values.options()).scatter_(0, place, values).narrow(0, 0, room), before};
}

void note_nodes(const Tensor& packed, int64_t receivers, int64_t senders) {
  if (packed.is_cpu() || packed.is_inference()) return;
  auto note = c10::make_intrusive<Note>(Nodes(receivers, senders), packed._version());
  const std::lock_guard<std::mutex> lock(notes);
  packed.unsafeGetTensorImpl()->set_backend_meta(std::move(note));
}

void check_packed(const char* op, const Tensor& packed, const GraphSize& size) {
  const auto& [receivers, senders, edges] = size;
  const int64_t length = packed_length(receivers, senders, edges);
  TORCH_CHECK(packed.scalar_type() == at::kInt && packed.dim() == 1 && packed.numel() == length, op,
              ": argument 'graph' must be the int32 result of eqaccel::graph for ", receivers, " receivers, ", senders,
              " senders and ", edges, " edges (", length, " values), got ", packed.scalar_type(), " of shape ",
              packed.sizes(), ". Build it from the edges that 'y' describes.");
  auto nodes = noted(packed);
  if (!nodes && is_capturing(packed.device())) {
    // What is recorded cannot wait for the device, so the device looks itself, in every replay.
    const Tensor right = packed.select(0, 0).eq(receivers).logical_and(packed.select(0, 1).eq(senders));
    at::_assert_async(right, "eqaccel: argument 'graph' was built for other numbers of receivers and senders");
    return;
  }
  if (!nodes) {
    nodes = read(packed);
    note_nodes(packed, nodes->first, nodes->second);
  }
  TORCH_CHECK(*nodes == Nodes(receivers, senders), op, ": argument 'graph' must be built for ", receivers,
              " receivers and ", senders, " senders, as this call has them, got one for ", nodes->first,
              " receivers and ", nodes->second, " senders. Build it from the edges of these nodes.");
}

}  // namespace eqaccel

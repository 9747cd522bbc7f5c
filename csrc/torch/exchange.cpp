// eqaccel::exchange: rows of ghost nodes, filled by the simulation program behind a handle (exchange.h). Linear, so its
// derivative is its transpose eqaccel::exchange_backward, and the derivative of that is eqaccel::exchange again.
#include "eqaccel/exchange.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>

#include "differentiate.h"
#include "operators.h"

namespace eqaccel {
namespace {
namespace exchange_file {

using at::Tensor;
using ops::AutogradContext;
using ops::variable_list;

GhostExchange* engine(int64_t handle) { return reinterpret_cast<GhostExchange*>(static_cast<intptr_t>(handle)); }

void check(const char* op, const char* name, const Tensor& t, int64_t num_local, int64_t num_nodes, int64_t handle) {
  TORCH_CHECK(t.scalar_type() == at::kFloat || t.scalar_type() == at::kDouble, op, ": argument '", name,
              "' must be float32 or float64, got ", t.scalar_type(), ". Convert it with .float() or .double().");
  TORCH_CHECK(num_nodes >= num_local && num_local >= 0, op, ": expected num_nodes >= num_local >= 0, got ", num_nodes,
              " and ", num_local, ". Count ghosts as nodes.");
  TORCH_CHECK(handle != 0 || num_nodes == num_local, op,
              ": argument 'handle' is 0, which means that there are no "
              "ghosts, but num_nodes is ",
              num_nodes, " and num_local ", num_local,
              ". Pass the address of an "
              "eqaccel::GhostExchange, or fold ghosts onto the local nodes that they are images of.");
}

bool is_double(const Tensor& t) { return t.scalar_type() == at::kDouble; }

void check_matrix(const char* op, const char* name, const Tensor& t) {
  TORCH_CHECK(t.dim() == 2, op, ": argument '", name, "' must have shape (nodes, width), got ", t.sizes(),
              ". Flatten the features of a node with .flatten(1).");
}

GhostNodes nodes_of(const char* op, int64_t handle, int64_t num_local, int64_t num_nodes) {
  GhostNodes nodes;
  engine(handle)->nodes(nodes);
  TORCH_CHECK(0 <= nodes.num_ghosts && nodes.num_ghosts <= num_nodes - num_local, op, ": the engine has ",
              nodes.num_ghosts, " ghosts, and there are ", num_nodes - num_local,
              " nodes behind the local ones. Count ghosts as nodes.");
  const int64_t *begin = nodes.sent, *end = begin + nodes.num_sent();
  TORCH_CHECK(std::all_of(begin, end, [=](int64_t node) { return 0 <= node && node < num_local; }), op,
              ": the engine sends nodes that are not local. Number the local ones first.");
  return nodes;
}

Tensor index_of(const int64_t* nodes, int64_t count, c10::Device device) {
  return at::from_blob(const_cast<int64_t*>(nodes), {count}, at::TensorOptions().dtype(at::kLong)).to(device);
}

// In host memory whatever the device: that is where messages are sent from.
Tensor host_rows(int64_t count, const Tensor& like) {
  return at::empty({count, like.size(1)}, like.options().device(at::kCPU).pinned_memory(!like.is_cpu()));
}

Tensor on_host(const Tensor& rows) {
  return rows.is_cpu() ? rows.contiguous() : host_rows(rows.size(0), rows).copy_(rows);
}

Tensor forward(const Tensor& x, int64_t handle, int64_t num_nodes) {
  constexpr const char* op = "eqaccel::exchange";
  check_matrix(op, "x", x);
  const int64_t local = x.size(0);
  check(op, "x", x, local, num_nodes, handle);
  if (handle == 0) return x.clone(at::MemoryFormat::Contiguous);
  const GhostNodes nodes = nodes_of(op, handle, local, num_nodes);
  const int64_t ghosts = nodes.num_ghosts;
  const Tensor rows = on_host(x.index_select(0, index_of(nodes.sent, nodes.num_sent(), x.device())));
  const Tensor ghost_rows = host_rows(ghosts, x);
  engine(handle)->forward(rows.const_data_ptr(), ghost_rows.mutable_data_ptr(), x.size(1), is_double(x));
  const Tensor filled = at::empty({num_nodes, x.size(1)}, x.options());
  filled.narrow(0, 0, local).copy_(x);
  filled.narrow(0, local, ghosts).copy_(ghost_rows, /*non_blocking=*/true);
  filled.narrow(0, local + ghosts, num_nodes - local - ghosts).zero_();
  return filled;
}

Tensor backward(const Tensor& gradient, int64_t handle, int64_t num_local) {
  constexpr const char* op = "eqaccel::exchange_backward";
  check_matrix(op, "gradient", gradient);
  check(op, "gradient", gradient, num_local, gradient.size(0), handle);
  if (handle == 0) return gradient.clone(at::MemoryFormat::Contiguous);
  const GhostNodes nodes = nodes_of(op, handle, num_local, gradient.size(0));
  const Tensor ghost_rows = on_host(gradient.narrow(0, num_local, nodes.num_ghosts));
  const Tensor rows = host_rows(nodes.num_sent(), gradient);
  engine(handle)->reverse(ghost_rows.const_data_ptr(), rows.mutable_data_ptr(), gradient.size(1), is_double(gradient));
  // A message after the other, so that a node in several of them has its sum in one order.
  const Tensor sums = gradient.narrow(0, 0, num_local).clone(at::MemoryFormat::Contiguous);
  const Tensor added = rows.to(gradient.device(), /*non_blocking=*/true);
  for (int64_t message = 0, begin = 0; message < nodes.num_messages; begin = nodes.ends[message++]) {
    const int64_t count = nodes.ends[message] - begin;
    const Tensor index = index_of(nodes.sent + begin, count, gradient.device());
    sums.index_copy_(0, index, sums.index_select(0, index).add_(added.narrow(0, begin, count)));
  }
  return sums;
}

Tensor forward_meta(const Tensor& x, int64_t, c10::SymInt num_nodes) {
  return ops::stand_in({std::move(num_nodes), x.sym_size(1)}, x);
}

// Everything about an exchange that is not a differentiable operand.
struct ExchangeProblem {
  int64_t handle;
  c10::SymInt rows;  // of the result
  bool transposed;  // eqaccel::exchange_backward instead of eqaccel::exchange
};

Tensor call(const ExchangeProblem& p, const Tensor& x) {
  using Signature = Tensor(const Tensor&, int64_t, c10::SymInt);
  static const auto straight = ops::find_operator<Signature>("eqaccel::exchange");
  static const auto transposed = ops::find_operator<Signature>("eqaccel::exchange_backward");
  return (p.transposed ? transposed : straight).call(x, p.handle, p.rows);
}

// Either operator as a function of its matrix, in which it is linear.
struct Exchange {
  static constexpr auto compute = call;

  static void save(AutogradContext& context, const ExchangeProblem& p, const variable_list& operands) {
    context.saved_data["handle"] = p.handle;
    context.saved_data["rows"] = operands[0].sym_size(0);
    context.saved_data["transposed"] = p.transposed;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    auto& saved = context->saved_data;
    // Called for undefined gradients too (as zeros): every rank must take part in every exchange.
    return {call({saved["handle"].toInt(), saved["rows"].toSymInt(), !saved["transposed"].toBool()}, gradients[0])};
  }

  static variable_list tangents(const ExchangeProblem& p, const variable_list&, const variable_list& along) {
    return {call(p, along[0])};
  }
};

template <bool transposed>
Tensor differentiable(const Tensor& x, int64_t handle, c10::SymInt rows) {
  return ops::differentiate<Exchange>(ExchangeProblem{handle, std::move(rows), transposed}, x);
}

void register_kernels(torch::Library& library) {
  library.impl("exchange", forward);
  library.impl("exchange_backward", backward);
}

TORCH_LIBRARY_IMPL(eqaccel, CPU, library) { register_kernels(library); }
TORCH_LIBRARY_IMPL(eqaccel, CUDA, library) { register_kernels(library); }
TORCH_LIBRARY_IMPL(eqaccel, Meta, library) {
  library.impl("exchange", forward_meta);
  library.impl("exchange_backward", forward_meta);
}
TORCH_LIBRARY_IMPL(eqaccel, Autograd, library) {
  library.impl("exchange", differentiable<false>);
  library.impl("exchange_backward", differentiable<true>);
}

}  // namespace exchange_file
}  // namespace
}  // namespace eqaccel

// eqaccel::tensor_product and its first three derivatives, on CPU and GPU alike: check the operands, allocate, launch
// through the runtime.
#include "tensor_product.h"

#include <ATen/Context.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "kernel_call.h"
#include "packed_index.h"
#include "third.h"

namespace eqaccel::ops {

Tensor tensor_product(const TensorProductProblem& p, const Tensor& x, const Tensor& y, const Tensor& w) {
  using Signature = Tensor(const Tensor&, int64_t, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                           c10::SymInt, int64_t, bool, bool);
  static const auto op = find_operator<Signature>("eqaccel::tensor_product");
  return op.call(p.payload, p.key, x, y, w, p.graph, p.receivers, p.z_dim, p.mul_ir, p.deterministic);
}

TensorProductGradients tensor_product_backward(const TensorProductProblem& p, const Tensor& gz, const Tensor& x,
                                               const Tensor& y, const Tensor& w) {
  using Signature = TensorProductGradients(const Tensor&, int64_t, const Tensor&, const Tensor&, const Tensor&,
                                           const Tensor&, const Tensor&, c10::SymInt, int64_t, bool, bool);
  static const auto op = find_operator<Signature>("eqaccel::tensor_product_backward");
  return op.call(p.payload, p.key, gz, x, y, w, p.graph, p.receivers, p.z_dim, p.mul_ir, p.deterministic);
}

TensorProductSecondGradients tensor_product_double_backward(const TensorProductProblem& p, const Tensor& gz,
                                                            const Tensor& x, const Tensor& y, const Tensor& w,
                                                            const Tensor& a, const Tensor& b, const Tensor& c) {
  using Signature = TensorProductSecondGradients(const Tensor&, int64_t, const Tensor&, const Tensor&, const Tensor&,
                                                 const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                 const Tensor&, c10::SymInt, int64_t, bool, bool);
  static const auto op = find_operator<Signature>("eqaccel::tensor_product_double_backward");
  return op.call(p.payload, p.key, gz, x, y, w, a, b, c, p.graph, p.receivers, p.z_dim, p.mul_ir, p.deterministic);
}

TensorProductThirdGradients tensor_product_triple_backward(const TensorProductProblem& t, const Tensor& gz,
                                                           const Tensor& x, const Tensor& y, const Tensor& w,
                                                           const Tensor& a, const Tensor& b, const Tensor& c,
                                                           const Tensor& g, const Tensor& p, const Tensor& q,
                                                           const Tensor& r) {
  using Signature =
      TensorProductThirdGradients(const Tensor&, int64_t, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                  const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                  const Tensor&, const Tensor&, const Tensor&, c10::SymInt, int64_t, bool, bool);
  static const auto op = find_operator<Signature>("eqaccel::tensor_product_triple_backward");
  return op.call(t.payload, t.key, gz, x, y, w, a, b, c, g, p, q, r, t.graph, t.receivers, t.z_dim, t.mul_ir,
                 t.deterministic);
}

namespace {

// out = the sum of `rows` of a matrix, pairwise: the order depends on the number of rows alone, not on threads.
template <class T>
void sum_rows(const T* matrix, const int32_t* rows, int64_t begin, int64_t end, int64_t columns, T* out) {
  constexpr int64_t leaf = 32;
  std::fill(out, out + columns, T(0));
  if (end - begin <= leaf) {
    for (int64_t i = begin; i < end; ++i) {
      const T* row = matrix + (rows == nullptr ? i : rows[i]) * columns;
      for (int64_t column = 0; column < columns; ++column) out[column] += row[column];
    }
    return;
  }
  const int64_t middle = begin + (end - begin) / 2;
  std::vector<T> right(columns);
  sum_rows(matrix, rows, begin, middle, columns, out);
  sum_rows(matrix, rows, middle, end, columns, right.data());
  for (int64_t column = 0; column < columns; ++column) out[column] += right[column];
}

// A call with a graph or a batch, and with weights of every edge or shared ones.
class TensorProductCall : public KernelCall {
 public:
  TensorProductCall(const char* op, Direction direction, const TensorProductProblem& problem, const Tensor& x,
                    const Tensor& y, const Tensor& w, const Tensor& w_row = {})
      : KernelCall(op, problem.payload, problem.key, x), direction_(direction) {
    TORCH_CHECK(x.dim() == 2 && y.dim() == 2, op, ": arguments 'x' and 'y' must have shapes (num_senders, ",
                program_->number("x_dim"), ") and (num_edges, ", program_->number("y_dim"), "), got ", x.sizes(),
                " and ", y.sizes(), ". Flatten leading dimensions with .flatten(0, -2).");
    ops_.num_receivers = problem.receivers.expect_int();
    ops_.num_senders = x.size(0);
    ops_.num_edges = y.size(0);
    ops_.mul_ir = problem.mul_ir;
    ops_.deterministic = problem.deterministic;
    const int64_t z_dim = program_->number("z_dim");
    TORCH_CHECK(problem.z_dim == z_dim, op, ": argument 'z_dim' must be ", z_dim, ", as in the payload, got ",
                problem.z_dim, ". Pass the values of one module.");
    set_graph(problem.graph);
    ops_.x = senders("x", x);
    ops_.y = edges("y", y);
    if (w_row.defined()) {
      ops_.w = weights_of_rows(w);
      ops_.w_stride = program_->number("w_dim");
      w_row_ = row_numbers(w_row, w.size(0));
    } else {
      shared_weights_ = w.dim() == 1 || w.size(0) != ops_.num_edges;
      may_sum_weights_ = like_.is_cpu() && ops_.row_ptr == nullptr && program_->number("sums_weights") > 0;
      std::tie(ops_.w, ops_.w_stride) = weights("w", w, rounds_weights());
    }
  }

  const void* receivers(const char* name, const Tensor& t) {
    return rows(name, t, "num_receivers", ops_.num_receivers, program_->number("z_dim"));
  }
  const void* senders(const char* name, const Tensor& t) {
    return rows(name, t, "num_senders", ops_.num_senders, program_->number("x_dim"));
  }
  const void* edges(const char* name, const Tensor& t) {
    return rows(name, t, "num_edges", ops_.num_edges, program_->number("y_dim"));
  }
  // Whether the kernel adds up the gradients of weights, which all rows of a batch share.
  bool sums_weights() const { return shared_weights_ && may_sum_weights_; }
  // Weights of every edge, or one row that all edges share (row stride 0); `rounded`: to bfloat16.
  std::pair<const void*, int64_t> weights(const char* name, const Tensor& t, bool rounded = false) {
    const int64_t w_dim = program_->number("w_dim");
    check_kind(name, t);
    const Tensor matrix = t.dim() == 1 ? t.unsqueeze(0) : t;
    TORCH_CHECK(
        matrix.dim() == 2 && matrix.size(1) == w_dim && (matrix.size(0) == ops_.num_edges || matrix.size(0) == 1), op_,
        ": argument '", name, "' must have shape (num_edges, ", w_dim, ") = (", ops_.num_edges, ", ", w_dim, "), or (",
        w_dim, ",) if all edges share it, got ", t.sizes(), ". Check weight_numel and the number of edges.");
    const bool is_view = matrix.stride(0) == 0 && (w_dim == 1 || matrix.stride(1) == 1);
    // Where gradients may be added up, a stride of 0 says that they are.
    const bool repeated = matrix.size(0) == 1 || (is_view && (shared_weights_ || !may_sum_weights_));
    const Tensor own = repeated ? matrix.narrow(0, 0, matrix.size(0) > 0) : matrix;
    const Tensor& kept = held_.emplace_back((rounded ? as_read(own) : own).contiguous());
    return {kept.const_data_ptr(), repeated ? 0 : w_dim};
  }

  // The sum of gradients of each edge's weights, if the edges share them.
  Tensor reduce_weights(const Tensor& per_edge, const Tensor& w) {
    if (!shared_weights_) return per_edge;
    if (sums_weights()) return per_edge.reshape(w.sizes());
    if (!like_.is_cpu()) {
      // In slot order, so that the result does not depend on how the edges are numbered.
      const Tensor ordered = edge_.defined() ? per_edge.index_select(0, edge_) : per_edge;
      return ordered.sum(0).reshape(w.sizes());
    }
    Tensor total = at::empty(w.sizes(), like_.options());
    AT_DISPATCH_FLOATING_TYPES(like_.scalar_type(), "sum_rows", [&] {
      sum_rows(per_edge.const_data_ptr<scalar_t>(), ops_.edge, 0, ops_.num_edges, per_edge.size(1),
               total.mutable_data_ptr<scalar_t>());
    });
    return total;
  }

  // Runs the kernel into `outputs`, which it fills completely; without edges they are zero and nothing is launched.
  void launch(at::ArrayRef<Tensor> outputs) {
    if (ops_.num_edges == 0) {
      for (const Tensor& output : outputs) output.zero_();
      return;
    }
    run(direction_, w_row_);
  }

 protected:
  const Direction direction_;
  const int32_t* w_row_ = nullptr;

 private:
  // Which row of the weights each edge has.
  const int32_t* row_numbers(const Tensor& w_row, int64_t count) {
    TORCH_CHECK(w_row.device() == like_.device() && w_row.scalar_type() == at::kInt && w_row.dim() == 1 &&
                    w_row.size(0) == ops_.num_edges,
                op_, ": argument 'w_row' must be int32 of shape (num_edges,) = (", ops_.num_edges, ",) on ",
                like_.device(), ", got ", w_row.scalar_type(), " of shape ", w_row.sizes(), " on ", w_row.device(),
                ". Pass the rows of pairs of edges.");
    const Tensor& kept = held_.emplace_back(w_row.contiguous());
    const int32_t* numbers = kept.const_data_ptr<int32_t>();
    if (!w_row.is_cpu()) return numbers;  // to look at them would wait for the device
    for (int64_t edge = 0; edge < ops_.num_edges; ++edge)
      TORCH_CHECK(numbers[edge] >= 0 && numbers[edge] < count, op_, ": argument 'w_row' must hold rows of 'w', 0 to ",
                  count - 1, ", got ", numbers[edge], " for edge ", edge, ". Pass weights and rows of one graph.");
    return numbers;
  }

  bool rounds_weights() const { return program_->rounds_weights(scalar_of(like_.scalar_type())); }
  // Weights rounded to bfloat16, to nearest, in the type that the kernel reads them in.
  Tensor as_read(const Tensor& w) const {
    const Tensor rounded = w.to(at::kBFloat16);
    return direction_ >= Direction::double_backward ? rounded.to(like_.scalar_type()) : rounded;
  }
  // Weights that edges share, which may come rounded.
  const void* weights_of_rows(const Tensor& w) {
    const bool rounds = rounds_weights();
    if (!rounds || w.scalar_type() != at::kBFloat16) check_kind("w", w);
    TORCH_CHECK(w.device() == like_.device(), op_, ": argument 'w' must be on ", like_.device(), ", like 'x', got ",
                w.device(), ". Convert it with .to(x.device).");
    return shaped_rows("w", rounds ? as_read(w) : w, "num_rows", w.dim() == 2 ? w.size(0) : 0,
                       program_->number("w_dim"));
  }

  const void* rows(const char* name, const Tensor& t, const char* count_name, int64_t count, int64_t dim) {
    check_kind(name, t);
    return shaped_rows(name, t, count_name, count, dim);
  }
  const void* shaped_rows(const char* name, const Tensor& t, const char* count_name, int64_t count, int64_t dim) {
    TORCH_CHECK(t.dim() == 2 && t.size(0) == count && t.size(1) == dim, op_, ": argument '", name,
                "' must have shape (", count_name, ", ", dim, ") = (", count, ", ", dim, "), got ", t.sizes(),
                ". Check the irreps and the number of rows.");
    return held_.emplace_back(t.contiguous()).const_data_ptr();
  }

  void set_graph(const Tensor& graph) {
    const int64_t R = ops_.num_receivers, S = ops_.num_senders, E = ops_.num_edges;
    constexpr int64_t limit = std::numeric_limits<int32_t>::max();
    TORCH_CHECK(std::max({R, S, E}) < limit, op_, ": nodes and edges must each number less than ", limit, ", got ", S,
                " senders, ", R, " receivers and ", E, " edges. Split a larger system.");
    if (graph.numel() == 0) {
      TORCH_CHECK(R == S && R == E, op_,
                  ": a batch (an empty 'graph') must have as many rows in 'x' and 'y' as "
                  "num_receivers = ",
                  R, ", got ", S, " and ", E, ". Pass a graph for a convolution.");
      return;
    }
    TORCH_CHECK(graph.device() == like_.device(), op_, ": argument 'graph' must be on ", like_.device(),
                ", like 'x', got ", graph.device(), ". Move it with .to(x.device).");
    const Tensor& kept = held_.emplace_back(graph.contiguous());
    const GraphSize size{R, S, E};
    check_packed(op_, kept, size);
    const int32_t* packed = kept.const_data_ptr<int32_t>();
    const PackedParts parts(packed, size);
    edge_ = kept.narrow(0, parts.edge - packed, E);
    ops_.row_ptr = parts.row_ptr;
    ops_.edge = parts.edge;
    ops_.sender = parts.sender;
    ops_.t_row_ptr = parts.t_row_ptr;
    ops_.t_slot = parts.t_slot;
  }

  Tensor edge_;
  bool shared_weights_ = false, may_sum_weights_ = false;
};

// A call for derivatives, of which the gradients of x, y and w are always some.
class GradientCall : public TensorProductCall {
 public:
  GradientCall(const char* op, Direction direction, const TensorProductProblem& problem, const Tensor& gz,
               const Tensor& x, const Tensor& y, const Tensor& w, const Tensor& w_row = {}, int64_t slots = all)
      : TensorProductCall(op, direction, problem, x, y, w, w_row), gx(new_rows(ops_.num_senders, "x_dim")),
        gy(new_rows(ops_.num_edges, "y_dim")),
        gw(new_rows(sums_weights() ? 1 : std::min(slots, ops_.num_edges), "w_dim")) {
    if (!problem.deterministic && problem.graph.numel() > 0) at::globalContext().alertNotDeterministic(op);
    ops_.gz = receivers("gz", gz);
    ops_.gx = gx.mutable_data_ptr();
    ops_.gy = gy.mutable_data_ptr();
    ops_.gw = gw.mutable_data_ptr();
  }

  // Runs the kernel on some slots after the other, on a GPU, where it fills `gw` for these alone.
  void launch_slots(int64_t slots, const std::function<void(int64_t first, const Tensor& gw)>& take) {
    const Kernel& kernel = translating_errors([&]() -> const Kernel& { return this->kernel(direction_); });
    const Tensor workspace = workspace_of(kernel.slots_workspace_bytes(ops_, slots));
    for (int64_t first = 0; first < ops_.num_edges; first += slots) {
      const int64_t last = std::min(first + slots, ops_.num_edges);
      translating_errors(
          [&] { kernel.launch_slots(ops_, w_row_, {first, last, slots}, current_stream(like_.device())); });
      take(first, gw.narrow(0, 0, last - first));
    }
  }

  const Tensor gx, gy, gw;

 private:
  static constexpr int64_t all = std::numeric_limits<int64_t>::max();
};

Tensor forward(const Tensor& payload, int64_t key, const Tensor& x, const Tensor& y, const Tensor& w,
               const Tensor& graph, c10::SymInt receivers, int64_t z_dim, bool mul_ir, bool deterministic) {
  const TensorProductProblem problem{payload, key, graph, std::move(receivers), z_dim, mul_ir, deterministic};
  TensorProductCall call("eqaccel::tensor_product", Direction::forward, problem, x, y, w);
  eq_operands& ops = call.operands();
  const Tensor z = call.new_rows(ops.num_receivers, "z_dim");
  ops.z = z.mutable_data_ptr();
  call.launch({z});
  return z;
}

TensorProductGradients backward(const Tensor& payload, int64_t key, const Tensor& gz, const Tensor& x, const Tensor& y,
                                const Tensor& w, const Tensor& graph, c10::SymInt receivers, int64_t z_dim, bool mul_ir,
                                bool deterministic) {
  const TensorProductProblem problem{payload, key, graph, std::move(receivers), z_dim, mul_ir, deterministic};
  GradientCall call("eqaccel::tensor_product_backward", Direction::backward, problem, gz, x, y, w);
  call.launch({call.gx, call.gy, call.gw});
  return {call.gx, call.gy, call.reduce_weights(call.gw, w)};
}

Tensor forward_shared(const Tensor& payload, int64_t key, const Tensor& x, const Tensor& y, const Tensor& w,
                      const Tensor& w_row, const Tensor& graph, int64_t receivers, int64_t z_dim, bool mul_ir,
                      bool deterministic) {
  const TensorProductProblem problem{payload, key, graph, receivers, z_dim, mul_ir, deterministic};
  TensorProductCall call("eqaccel::tensor_product_shared", Direction::forward, problem, x, y, w, w_row);
  eq_operands& ops = call.operands();
  const Tensor z = call.new_rows(ops.num_receivers, "z_dim");
  ops.z = z.mutable_data_ptr();
  call.launch({z});
  return z;
}

TensorProductGradients backward_shared(const Tensor& payload, int64_t key, const Tensor& gz, const Tensor& x,
                                       const Tensor& y, const Tensor& w, const Tensor& w_row, const Tensor& graph,
                                       int64_t receivers, int64_t z_dim, bool mul_ir, bool deterministic) {
  const TensorProductProblem problem{payload, key, graph, receivers, z_dim, mul_ir, deterministic};
  GradientCall call("eqaccel::tensor_product_shared_backward", Direction::backward, problem, gz, x, y, w, w_row);
  call.launch({call.gx, call.gy, call.gw});
  return {call.gx, call.gy, call.gw};
}

TensorProductSecondGradients double_backward(const Tensor& payload, int64_t key, const Tensor& gz, const Tensor& x,
                                             const Tensor& y, const Tensor& w, const Tensor& a, const Tensor& b,
                                             const Tensor& c, const Tensor& graph, c10::SymInt receivers, int64_t z_dim,
                                             bool mul_ir, bool deterministic) {
  const TensorProductProblem problem{payload, key, graph, std::move(receivers), z_dim, mul_ir, deterministic};
  GradientCall call("eqaccel::tensor_product_double_backward", Direction::double_backward, problem, gz, x, y, w);
  eq_operands& ops = call.operands();
  ops.a = call.senders("a", a);
  ops.b = call.edges("b", b);
  std::tie(ops.c, ops.c_stride) = call.weights("c", c);
  TORCH_CHECK(ops.c_stride == 0 || !call.sums_weights(),
              "eqaccel::tensor_product_double_backward: argument 'c' must have the shape of 'w', ", w.sizes(), ", got ",
              c.sizes(), ". Add up what rows have.");
  const Tensor ggz = call.new_rows(ops.num_receivers, "z_dim");
  ops.z = ggz.mutable_data_ptr();
  call.launch({ggz, call.gx, call.gy, call.gw});
  return {ggz, call.gx, call.gy, call.reduce_weights(call.gw, w)};
}

// A call of the one kernel for third derivatives, which has a program of its own.
class ThirdCall : public GradientCall {
 public:
  ThirdCall(std::shared_ptr<Program> program, const TensorProductProblem& problem, const Tensor& gz, const Tensor& x,
            const Tensor& y, const Tensor& w)
      : GradientCall("eqaccel::tensor_product_triple_backward", Direction::triple_backward, problem, gz, x, y, w),
        ga(new_rows(ops_.num_senders, "x_dim")), gb(new_rows(ops_.num_edges, "y_dim")),
        gc(new_rows(ops_.num_edges, "w_dim")), ggz(new_rows(ops_.num_receivers, "z_dim")) {
    program_ = std::move(program);
    ops_.z = ggz.mutable_data_ptr();
    ops_.ga = ga.mutable_data_ptr();
    ops_.gb = gb.mutable_data_ptr();
    ops_.gc = gc.mutable_data_ptr();
  }

  const Tensor ga, gb, gc, ggz;
};

TensorProductThirdGradients triple_backward(const Tensor& payload, int64_t key, const Tensor& gz, const Tensor& x,
                                            const Tensor& y, const Tensor& w, const Tensor& a, const Tensor& b,
                                            const Tensor& c, const Tensor& g, const Tensor& p, const Tensor& q,
                                            const Tensor& r, const Tensor& graph, c10::SymInt receivers, int64_t z_dim,
                                            bool mul_ir, bool deterministic) {
  const TensorProductProblem problem{payload, key, graph, std::move(receivers), z_dim, mul_ir, deterministic};
  program_of("eqaccel::tensor_product_triple_backward", payload, key);
  auto program = third_program_of(problem, x);
  if (!program) return compose_third_gradients(problem, {gz, x, y, w, a, b, c}, {g, p, q, r});
  ThirdCall call(std::move(program), problem, gz, x, y, w);
  eq_operands& ops = call.operands();
  ops.a = call.senders("a", a);
  ops.b = call.edges("b", b);
  std::tie(ops.c, ops.c_stride) = call.weights("c", c);
  ops.g = call.receivers("g", g);
  ops.p = call.senders("p", p);
  ops.q = call.edges("q", q);
  std::tie(ops.r, ops.r_stride) = call.weights("r", r);
  call.launch({call.ggz, call.gx, call.gy, call.gw, call.ga, call.gb, call.gc});
  return {
      call.ggz, call.gx, call.gy, call.reduce_weights(call.gw, w), call.ga, call.gb, call.reduce_weights(call.gc, w)};
}

// The packed index of some slots of a graph, whose slots have to be its edges, on a CPU.
Tensor slots_of(const char* op, const Tensor& graph, const GraphSize& size, int64_t first, int64_t count) {
  const Tensor kept = graph.contiguous();
  check_packed(op, kept, size);
  const PackedParts<const int32_t*> from(kept.const_data_ptr<int32_t>(), size);
  for (int64_t slot = first; slot < first + count; ++slot)
    TORCH_CHECK(from.edge[slot] == slot, op,
                ": argument 'graph' must have edges that are in the order of slots, got edge ", from.edge[slot],
                " in slot ", slot, ". Sort the edges, or take all slots at once.");
  const GraphSize own{size.receivers, size.senders, count};
  const Tensor result = at::empty({packed_length(own.receivers, own.senders, own.edges)}, kept.options());
  int32_t* packed = result.mutable_data_ptr<int32_t>();
  packed[0] = static_cast<int32_t>(own.receivers);
  packed[1] = static_cast<int32_t>(own.senders);
  const PackedParts<int32_t*> to(packed, own);
  const auto local = [&](int64_t slot) { return static_cast<int32_t>(std::clamp(slot - first, int64_t(0), count)); };
  for (int64_t n = 0; n <= own.receivers; ++n) to.row_ptr[n] = local(from.row_ptr[n]);
  for (int64_t n = 0; n < count; ++n) to.edge[n] = static_cast<int32_t>(n);
  std::copy_n(from.sender + first, count, to.sender);
  int32_t entries = 0;
  for (int64_t n = 0; n < own.senders; ++n) {
    to.t_row_ptr[n] = entries;
    for (int32_t t = from.t_row_ptr[n]; t < from.t_row_ptr[n + 1]; ++t)
      if (from.t_slot[t] >= first && from.t_slot[t] < first + count) to.t_slot[entries++] = local(from.t_slot[t]);
  }
  to.t_row_ptr[own.senders] = entries;
  return result;
}

// Shapes without data, for fake tensors (compile, export, make_fx).
Tensor forward_shape(const Tensor&, int64_t, const Tensor& x, const Tensor&, const Tensor&, const Tensor&,
                     c10::SymInt receivers, int64_t z_dim, bool, bool) {
  return stand_in({receivers, z_dim}, x);
}

TensorProductGradients backward_shape(const Tensor&, int64_t, const Tensor&, const Tensor& x, const Tensor& y,
                                      const Tensor& w, const Tensor&, c10::SymInt, int64_t, bool, bool) {
  return {stand_in(x), stand_in(y), stand_in(w)};
}

TensorProductSecondGradients double_backward_shape(const Tensor&, int64_t, const Tensor& gz, const Tensor& x,
                                                   const Tensor& y, const Tensor& w, const Tensor&, const Tensor&,
                                                   const Tensor&, const Tensor&, c10::SymInt, int64_t, bool, bool) {
  return {stand_in(gz), stand_in(x), stand_in(y), stand_in(w)};
}

TensorProductThirdGradients triple_backward_shape(const Tensor&, int64_t, const Tensor& gz, const Tensor& x,
                                                  const Tensor& y, const Tensor& w, const Tensor&, const Tensor&,
                                                  const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                  const Tensor&, const Tensor&, c10::SymInt, int64_t, bool, bool) {
  return {stand_in(gz), stand_in(x), stand_in(y), stand_in(w), stand_in(x), stand_in(y), stand_in(w)};
}

Tensor forward_autocast(const Tensor& payload, int64_t key, const Tensor& x, const Tensor& y, const Tensor& w,
                        const Tensor& graph, c10::SymInt receivers, int64_t z_dim, bool mul_ir, bool deterministic) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto cast = [&](const Tensor& t) { return cast_to_float32(t, x); };
  return tensor_product({payload, key, graph, std::move(receivers), z_dim, mul_ir, deterministic}, cast(x), cast(y),
                        cast(w));
}

void register_kernels(torch::Library& library) {
  library.impl("tensor_product", forward);
  library.impl("tensor_product_backward", backward);
  library.impl("tensor_product_double_backward", double_backward);
  library.impl("tensor_product_triple_backward", triple_backward);
  library.impl("tensor_product_shared", forward_shared);
  library.impl("tensor_product_shared_backward", backward_shared);
}

// The CUDA key is registered in CPU builds of torch too: nothing here needs CUDA to compile or link.
TORCH_LIBRARY_IMPL(eqaccel, CPU, library) { register_kernels(library); }
TORCH_LIBRARY_IMPL(eqaccel, CUDA, library) { register_kernels(library); }
TORCH_LIBRARY_IMPL(eqaccel, Meta, library) {
  library.impl("tensor_product", forward_shape);
  library.impl("tensor_product_backward", backward_shape);
  library.impl("tensor_product_double_backward", double_backward_shape);
  library.impl("tensor_product_triple_backward", triple_backward_shape);
}
TORCH_LIBRARY_IMPL(eqaccel, AutocastCPU, library) { library.impl("tensor_product", forward_autocast); }
TORCH_LIBRARY_IMPL(eqaccel, AutocastCUDA, library) { library.impl("tensor_product", forward_autocast); }

}  // namespace

std::shared_ptr<Program> third_program_of(const TensorProductProblem& p, const Tensor& x) {
  const auto device = static_cast<int>(std::max<c10::DeviceIndex>(x.device().index(), 0));
  if (!x.is_cpu() && !x.is_cuda()) return nullptr;
  return translating_errors(
      [&] { return third_program(p.key, backend_of(x.device()), scalar_of(x.scalar_type()), device); });
}

std::tuple<Tensor, Tensor> tensor_product_shared_backward(
    const TensorProductProblem& p, const Tensor& gz, const Tensor& x, const Tensor& y, const Tensor& w,
    const Tensor& w_row, int64_t slots, const std::function<void(int64_t first, const Tensor& gw)>& take) {
  constexpr const char* op = "eqaccel::shared_convolution_backward";
  TORCH_CHECK(slots > 0, op, ": argument 'slots' must be positive, got ", slots, ".");
  if (!x.is_cpu()) {
    GradientCall call(op, Direction::backward, p, gz, x, y, w, w_row, slots);
    call.launch_slots(slots, take);
    return {call.gx, call.gy};
  }
  const Tensor gx = at::zeros_like(x), gy = at::empty_like(y);
  for (int64_t first = 0, edges = y.size(0); first < edges; first += slots) {
    const int64_t count = std::min(slots, edges - first);
    const auto of = [&](const Tensor& rows) { return rows.narrow(0, first, count); };
    TensorProductProblem own = p;
    own.graph = slots_of(op, p.graph, {p.receivers.expect_int(), x.size(0), edges}, first, count);
    GradientCall call(op, Direction::backward, own, gz, x, of(y), w, of(w_row));
    call.launch({call.gx, call.gy, call.gw});
    gx.add_(call.gx);
    of(gy).copy_(call.gy);
    take(first, call.gw);
  }
  return {gx, gy};
}

}  // namespace eqaccel::ops

// eqaccel::gate, activations of scalars and of gates that multiply channels, and its first two derivatives: each is one
// kernel. Where the second is differentiated itself, it is composed of torch's operators.
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <locale>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

#include "logistic.h"
#include "row_call.h"
#include "row_function.h"

namespace eqaccel::ops {
namespace {
namespace gate_file {

// A line of GateSpec.text().
struct Part {
  std::string kind;
  double factor;
  int64_t first, count, dim, channel, output;  // dim 0: scalars
  int64_t outputs() const { return count * std::max<int64_t>(dim, 1); }
};

std::vector<Part> read_parts(const std::string& text) {
  std::istringstream lines(text);
  lines.imbue(std::locale::classic());
  std::vector<Part> parts;
  for (Part p; lines >> p.kind >> p.factor >> p.first >> p.count >> p.dim >> p.channel >> p.output;) parts.push_back(p);
  TORCH_CHECK(!parts.empty() && lines.eof(), "eqaccel::gate: argument 'parts' must be GateSpec.text(), got '", text,
              "'.");
  return parts;
}

struct Problem {
  Tensor payload;
  int64_t key;
  std::string parts;

  template <class Self, class Run>
  static void each(Self& p, const Run& run) {  // for KeptProblem
    run("key", p.key);
    run("parts", p.parts);
  }
};
using SecondGradients = RowSecondGradients;

Tensor call_forward(const Problem& p, const Tensor& x) {
  using Signature = Tensor(const Tensor&, int64_t, const Tensor&, c10::string_view);
  static const auto op = find_operator<Signature>("eqaccel::gate");
  return op.call(p.payload, p.key, x, p.parts);
}
Tensor call_backward(const Problem& p, const Tensor& gz, const Tensor& x) {
  using Signature = Tensor(const Tensor&, int64_t, const Tensor&, const Tensor&, c10::string_view);
  static const auto op = find_operator<Signature>("eqaccel::gate_backward");
  return op.call(p.payload, p.key, gz, x, p.parts);
}
SecondGradients call_double_backward(const Problem& p, const Tensor& gz, const Tensor& x, const Tensor& a) {
  using Signature =
      SecondGradients(const Tensor&, int64_t, const Tensor&, const Tensor&, const Tensor&, c10::string_view);
  static const auto op = find_operator<Signature>("eqaccel::gate_double_backward");
  return op.call(p.payload, p.key, gz, x, a, p.parts);
}

class GateCall : public RowCall {
 public:
  GateCall(const char* op, const Tensor& payload, int64_t key, const Tensor& x) : RowCall(op, payload, key, x) {
    ops_.num_edges = x.size(0) * program_->number("activations");
  }
};

Tensor run_forward(const Tensor& payload, int64_t key, const Tensor& x, c10::string_view) {
  GateCall call("eqaccel::gate", payload, key, x);
  const Tensor z = call.new_rows("z_dim");
  call.operands().z = z.mutable_data_ptr();
  call.launch(Direction::forward);
  return z;
}
Tensor run_backward(const Tensor& payload, int64_t key, const Tensor& gz, const Tensor& x, c10::string_view) {
  GateCall call("eqaccel::gate_backward", payload, key, x);
  call.operands().gz = call.rows("gz", gz, "z_dim");
  const Tensor gx = call.new_rows("x_dim");
  call.operands().gx = gx.mutable_data_ptr();
  call.launch(Direction::backward);
  return gx;
}
SecondGradients run_double_backward(const Tensor& payload, int64_t key, const Tensor& gz, const Tensor& x,
                                    const Tensor& a, c10::string_view) {
  GateCall call("eqaccel::gate_double_backward", payload, key, x);
  call.operands().gz = call.rows("gz", gz, "z_dim");
  call.operands().a = call.rows("a", a, "x_dim");
  const Tensor ggz = call.new_rows("z_dim"), gx = call.new_rows("x_dim");
  call.operands().z = ggz.mutable_data_ptr();
  call.operands().gx = gx.mutable_data_ptr();
  call.launch(Direction::double_backward);
  return {ggz, gx};
}

// An activation and its first two derivatives.
struct Curve {
  Tensor value, slope, curvature;
};
Curve curve_of(const Part& part, const Tensor& x) {
  const Logistic s(part.kind == "tanh" ? 2 * x : x);
  const auto times = [&](const Tensor& value, const Tensor& slope, const Tensor& curvature) {
    return Curve{part.factor * value, part.factor * slope, part.factor * curvature};
  };
  if (part.kind == "silu") return times(x * s.of, s.silu_slope(), s.silu_curvature());
  if (part.kind == "sigmoid") return times(s.of, s.of * s.rest, s.of * s.rest * (s.rest - s.of));
  if (part.kind == "tanh") return times(at::tanh(x), 4 * s.of * s.rest, -8 * s.of * s.rest * at::tanh(x));
  if (part.kind == "ssp") {
    const Tensor is_line = x > 20;
    return times(at::softplus(x) - std::log(2.0), at::where(is_line, at::ones_like(x), s.of),
                 at::where(is_line, at::zeros_like(x), s.of * s.rest));
  }
  TORCH_CHECK(part.kind == "abs", "eqaccel::gate: argument 'parts' must name known activations, got '", part.kind,
              "'.");
  return times(x.abs(), at::sgn(x), at::zeros_like(x));
}

SecondGradients composed(const Problem& p, const Tensor& gz, const Tensor& x, const Tensor& a) {
  variable_list ggz, gx;
  std::vector<int64_t> places;  // in x, of the parts of gx
  for (const Part& part : read_parts(p.parts)) {
    const auto scalars = [&](const Tensor& rows) { return rows.narrow(1, part.first, part.count); };
    const Curve f = curve_of(part, scalars(x));
    const Tensor along = scalars(a), g = gz.narrow(1, part.output, part.outputs());
    places.push_back(part.first);
    if (part.dim == 0) {
      ggz.push_back(along * f.slope);
      gx.push_back(along * g * f.curvature);
      continue;
    }
    const auto channels = [&](const Tensor& rows, int64_t column) {
      return rows.narrow(1, column, part.outputs()).unflatten(1, {part.count, part.dim});
    };
    const Tensor xs = channels(x, part.channel), of_xs = channels(a, part.channel), gs = channels(gz, part.output);
    const Tensor slope = (along * f.slope).unsqueeze(2);
    ggz.push_back((of_xs * f.value.unsqueeze(2) + slope * xs).flatten(1));
    gx.push_back((of_xs * gs).sum(2) * f.slope + along * f.curvature * (gs * xs).sum(2));
    gx.push_back((slope * gs).flatten(1));
    places.push_back(part.channel);
  }
  std::vector<std::size_t> order(places.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](std::size_t m, std::size_t n) { return places[m] < places[n]; });
  variable_list sorted;
  for (const std::size_t n : order) sorted.push_back(gx[n]);
  return {at::cat(ggz, 1), at::cat(sorted, 1)};
}

struct Gate {
  using Problem = gate_file::Problem;
  static constexpr auto forward = call_forward;
  static constexpr auto backward = call_backward;
  static constexpr auto double_backward = call_double_backward;
  static constexpr auto composed = gate_file::composed;

  // The gradient of <gz, z> is linear in gz, and its derivative along it, of a tangent of x, is that of z along the tangent.
  static Tensor tangent(const Problem& p, const Tensor& x, const Tensor& along) {
    const Tensor any_gz = at::zeros_symint({x.sym_size(0), outputs(p)}, x.options());
    return std::get<0>(call_double_backward(p, any_gz, x, along));
  }
  static int64_t outputs(const Problem& p) {
    const Part last = read_parts(p.parts).back();
    return last.output + last.outputs();
  }
};
using Differentiable = RowFunction<Gate>;

Problem problem_of(const Tensor& payload, int64_t key, c10::string_view parts) {
  return {payload, key, std::string(parts)};
}

Tensor forward(const Tensor& payload, int64_t key, const Tensor& x, c10::string_view parts) {
  return Differentiable::forward(problem_of(payload, key, parts), x);
}
Tensor backward(const Tensor& payload, int64_t key, const Tensor& gz, const Tensor& x, c10::string_view parts) {
  return Differentiable::backward(problem_of(payload, key, parts), gz, x);
}
SecondGradients double_backward(const Tensor& payload, int64_t key, const Tensor& gz, const Tensor& x, const Tensor& a,
                                c10::string_view parts) {
  return Differentiable::double_backward(problem_of(payload, key, parts), gz, x, a);
}

// Shapes without data, for fake tensors.
Tensor forward_shape(const Tensor& payload, int64_t key, const Tensor& x, c10::string_view parts) {
  return stand_in({x.sym_size(0), Gate::outputs(problem_of(payload, key, parts))}, x);
}
Tensor backward_shape(const Tensor&, int64_t, const Tensor&, const Tensor& x, c10::string_view) { return stand_in(x); }
SecondGradients double_backward_shape(const Tensor&, int64_t, const Tensor& gz, const Tensor& x, const Tensor&,
                                      c10::string_view) {
  return {stand_in(gz), stand_in(x)};
}

// Under autocast in float32, as tensor products.
Tensor forward_autocast(const Tensor& payload, int64_t key, const Tensor& x, c10::string_view parts) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return call_forward(problem_of(payload, key, parts), cast_to_float32(x, x));
}

void register_kernels(torch::Library& library) {
  library.impl("gate", run_forward);
  library.impl("gate_backward", run_backward);
  library.impl("gate_double_backward", run_double_backward);
}
TORCH_LIBRARY_IMPL(eqaccel, CPU, library) { register_kernels(library); }
TORCH_LIBRARY_IMPL(eqaccel, CUDA, library) { register_kernels(library); }
TORCH_LIBRARY_IMPL(eqaccel, Autograd, library) {
  library.impl("gate", forward);
  library.impl("gate_backward", backward);
  library.impl("gate_double_backward", double_backward);
}
TORCH_LIBRARY_IMPL(eqaccel, Meta, library) {
  library.impl("gate", forward_shape);
  library.impl("gate_backward", backward_shape);
  library.impl("gate_double_backward", double_backward_shape);
}
TORCH_LIBRARY_IMPL(eqaccel, AutocastCPU, library) { library.impl("gate", forward_autocast); }
TORCH_LIBRARY_IMPL(eqaccel, AutocastCUDA, library) { library.impl("gate", forward_autocast); }

}  // namespace gate_file
}  // namespace
}  // namespace eqaccel::ops

// Derivatives of linear maps by attributes: products of torch, path by path, in the order that writes less to memory.
#include <locale>
#include <sstream>

#include "host_memory.h"
#include "linear.h"
#include "payload.h"

namespace eqaccel::ops {
namespace {

constexpr int64_t piece = 1 << 24;  // numbers that are laid out at a time
constexpr int64_t cached = 1 << 18;  // the same for the caches of a CPU

struct Path {
  int64_t source, mul_in, target, mul_out, components, weights;
  double coefficient;

  // (rows, components, mul)
  static Tensor columns(const Tensor& rows, int64_t first, int64_t mul, int64_t components) {
    return rows.narrow(1, first, mul * components).view({rows.size(0), mul, components}).transpose(1, 2);
  }
  Tensor read(const Tensor& x) const { return columns(x, source, mul_in, components); }
  Tensor written(const Tensor& z) const { return columns(z, target, mul_out, components); }
  // (mul_in, matrices, mul_out)
  Tensor matrix(const Tensor& w, int64_t matrices) const {
    return w.narrow(0, weights, mul_in * matrices * mul_out).view({mul_in, matrices, mul_out});
  }
};

std::vector<Path> read_paths(const Program& program) {
  std::istringstream lines(program.entry("paths"));
  lines.imbue(std::locale::classic());
  std::vector<Path> paths;
  for (Path p; lines >> p.source >> p.mul_in >> p.target >> p.mul_out >> p.components >> p.weights >> p.coefficient;)
    paths.push_back(p);
  if (paths.empty() || !lines.eof()) throw bad_payload("a line of seven numbers for each path", "others");
  return paths;
}

// Sums over the components of all pairs of channels first, (mul_in mul_out, attributes) of weights then.
Tensor by_pairs(const Tensor& x, const Tensor& gz, const Tensor& weights) {
  Tensor pairs = empty_kept({x.size(0), x.size(2), gz.size(2)}, x.options());
  at::bmm_out(pairs, x.transpose(1, 2), gz);
  return at::mm(pairs.flatten(1), weights);
}

// The outputs for each attribute alone, by (mul_in, attributes mul_out) of weights, which then multiply their gradients.
Tensor by_outputs(const Tensor& x, const Tensor& gz, const Tensor& weights, int64_t attributes) {
  Tensor outputs = empty_kept({x.size(0) * x.size(1), weights.size(1)}, x.options());
  at::mm_out(outputs, x.reshape({-1, x.size(2)}), weights);
  return outputs.view({x.size(0), x.size(1), attributes, gz.size(2)}).mul_(gz.unsqueeze(2)).sum({1, 3});
}

}  // namespace

Tensor linear_by_attributes(const Program& program, const Tensor& x, const Tensor& w, const Tensor& gz) {
  const int64_t rows = x.size(0), attributes = program.number("y_dim");
  const Tensor result = at::zeros({rows, attributes}, x.options());
  if (attributes == 0) return result;
  for (const Path& p : read_paths(program)) {
    const bool pairs = p.mul_in < attributes * p.components;
    const Tensor matrix = p.matrix(w, attributes), from = p.read(x), to = p.written(gz);
    const Tensor factor =
        pairs ? matrix.transpose(1, 2).reshape({p.mul_in * p.mul_out, attributes}) : matrix.flatten(1);
    const int64_t written = p.mul_out * (pairs ? p.mul_in : attributes * p.components);  // numbers of a row
    const int64_t together = std::max<int64_t>(1, (x.is_cpu() ? cached : piece) / written);
    for (int64_t first = 0; first < rows; first += together) {
      const int64_t count = std::min(together, rows - first);
      const auto some = [&](const Tensor& t) { return t.narrow(0, first, count); };
      const Tensor sums =
          pairs ? by_pairs(some(from), some(to), factor) : by_outputs(some(from), some(to), factor, attributes);
      some(result).add_(sums, p.coefficient);
    }
  }
  return result;
}

}  // namespace eqaccel::ops

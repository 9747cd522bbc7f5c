// Derivatives of linear maps by attributes: products of torch, path by path.
#include <locale>
#include <sstream>

#include "linear.h"
#include "payload.h"

namespace eqaccel::ops {
namespace {

constexpr int64_t piece = 1 << 24;  // numbers that are laid out at a time

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

}  // namespace

Tensor linear_by_attributes(const Program& program, const Tensor& x, const Tensor& w, const Tensor& gz) {
  const int64_t rows = x.size(0), attributes = program.number("y_dim");
  const Tensor result = at::zeros({rows, attributes}, x.options());
  if (attributes == 0) return result;
  for (const Path& p : read_paths(program)) {
    const Tensor from = p.read(x).transpose(1, 2), to = p.written(gz);
    const Tensor matrix = p.matrix(w, attributes).transpose(1, 2).reshape({p.mul_in * p.mul_out, attributes});
    const int64_t together = std::max<int64_t>(1, piece / (p.mul_in * p.mul_out));
    for (int64_t first = 0; first < rows; first += together) {
      const int64_t count = std::min(together, rows - first);
      const Tensor pairs = at::bmm(from.narrow(0, first, count), to.narrow(0, first, count));
      result.narrow(0, first, count).add_(at::mm(pairs.flatten(1), matrix), p.coefficient);
    }
  }
  return result;
}

}  // namespace eqaccel::ops

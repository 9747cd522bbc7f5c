// Derivatives of linear maps by what all rows share, or by attributes: products of torch, path by path.
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

// The sum over rows and components of x times gz, (columns of x, columns of gz): written where the result is, since
// GPUs wait for each call.
void write_sum(const Tensor& result, const Tensor& x, const Tensor& gz, double coefficient) {
  Tensor target = result;
  at::addmm_out(target, result, x.reshape({-1, x.size(-1)}).t(), gz.reshape({-1, gz.size(-1)}), 0, coefficient);
}

// The rows that have an attribute, and how much of it, (rows, 1, 1).
struct Present {
  int64_t attribute;
  Tensor rows, amounts;
};

// Asks the device; for a CPU.
std::vector<Present> present_attributes(const Tensor& y) {
  std::vector<Present> found;
  for (int64_t z = 0; z < y.size(1); ++z) {
    const Tensor column = y.select(1, z), rows = column.nonzero().flatten();
    if (rows.numel() > 0) found.push_back({z, rows, column.index_select(0, rows).view({-1, 1, 1})});
  }
  return found;
}

// On a GPU: all attributes of all rows, some at a time.
void write_all(const Path& p, const Tensor& x, const Tensor& y, const Tensor& gz, const Tensor& result) {
  const int64_t together = std::max<int64_t>(1, piece / std::max<int64_t>(x.numel(), 1));
  for (int64_t z = 0; z < y.size(1); z += together) {
    const int64_t count = std::min(together, y.size(1) - z);
    const Tensor scaled = x.unsqueeze(3) * y.narrow(1, z, count).view({x.size(0), 1, 1, count});
    const Tensor target = result.narrow(1, z, count);
    const bool is_whole = count == y.size(1);
    const Tensor sums = is_whole ? target.flatten(0, 1) : at::empty({p.mul_in * count, p.mul_out}, x.options());
    write_sum(sums, scaled.flatten(2), gz, p.coefficient);
    if (!is_whole) target.copy_(sums.view({p.mul_in, count, p.mul_out}));
  }
}

}  // namespace

Tensor linear_by_weights(const Program& program, const Tensor& x, const Tensor& y, const Tensor& gz) {
  const Tensor result = at::zeros({program.number("w_dim")}, x.options());
  const int64_t attributes = y.size(1);
  const std::vector<Present> present = x.is_cpu() ? present_attributes(y) : std::vector<Present>();
  for (const Path& p : read_paths(program)) {
    const Tensor matrix = p.matrix(result, std::max<int64_t>(attributes, 1));
    const Tensor from = p.read(x), to = p.written(gz);
    if (attributes == 0) write_sum(matrix.select(1, 0), from, to, p.coefficient);
    else if (!x.is_cpu()) write_all(p, from, y, to, matrix);
    for (const auto& [attribute, rows, amounts] : present) {
      const Tensor some = to.index_select(0, rows);
      write_sum(matrix.select(1, attribute), from.index_select(0, rows) * amounts, some, p.coefficient);
    }
  }
  return result;
}

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

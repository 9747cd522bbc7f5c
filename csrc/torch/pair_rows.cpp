// eqaccel::take_pairs and eqaccel::spread_pairs on a CPU, and their derivatives: either is the other's transpose.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <atomic>
#include <cmath>

#include "differentiate.h"
#include "edge_pairs.h"

namespace eqaccel::ops {

void check_pairs(const char* op, const Tensor& matrix, int64_t rows, const Tensor& row, const Tensor& edges,
                 const Tensor& differ) {
  const bool is_real = matrix.scalar_type() == at::kFloat || matrix.scalar_type() == at::kDouble;
  TORCH_CHECK(is_real && matrix.dim() == 2 && matrix.size(0) == rows, op,
              ": the matrix must be float32 or float64 of shape (", rows, ", columns), got ", matrix.scalar_type(),
              " of shape ", matrix.sizes(), ". Pass a row for each edge, or for each pair.");
  const auto fits = [&](const Tensor& t, at::ScalarType type, int64_t dims) {
    return t.scalar_type() == type && t.dim() == dims && t.is_contiguous() && t.device() == matrix.device();
  };
  TORCH_CHECK(fits(row, at::kInt, 1) && fits(edges, at::kInt, 2) && edges.size(1) == 2, op,
              ": arguments 'row' and 'edges' must be contiguous int32 of shapes (num_edges,) and (num_pairs, 2) on ",
              matrix.device(), ", got ", row.sizes(), " and ", edges.sizes(), ". Pass the pairs of one graph.");
  TORCH_CHECK(!differ.defined() || (fits(differ, at::kDouble, 1) && differ.size(0) == 1), op,
              ": argument 'differ' must be float64 of shape (1,) on ", matrix.device(), ", got ", differ.sizes(), ".");
}

namespace {
namespace pair_rows_file {

// Rows are looked at before they are read: what is passed may be of another graph.
void check_range(const char* op, const Tensor& index, int64_t lowest, int64_t count) {
  const int32_t* values = index.const_data_ptr<int32_t>();
  for (int64_t n = 0; n < index.numel(); ++n)
    TORCH_CHECK(values[n] >= (n % 2 ? lowest : 0) && values[n] < count, op, ": expected rows from 0 to ", count - 1,
                ", got ", values[n], ". Pass the pairs of one graph.");
}

template <class T>
bool take(const T* values, const int32_t* edges, int64_t pairs, int64_t columns, T* taken) {
  std::atomic<bool> differ = false;
  at::parallel_for(0, pairs, 256, [&](int64_t begin, int64_t end) {
    bool found = false;
    for (int64_t pair = begin; pair < end; ++pair) {
      const int32_t first = edges[2 * pair], second = edges[2 * pair + 1];
      const T *own = values + first * columns, *other = values + (second < 0 ? first : second) * columns;
      for (int64_t c = 0; c < columns; ++c) {
        taken[pair * columns + c] = own[c];
        found |= own[c] != other[c] && !(std::isnan(own[c]) && std::isnan(other[c]));  // NaN is the same as NaN
      }
    }
    if (found) differ = true;
  });
  return differ;
}

Tensor take_on_cpu(const Tensor&, int64_t, const Tensor& values, const Tensor& row, const Tensor& edges,
                   const Tensor& differ) {
  constexpr const char* op = "eqaccel::take_pairs";
  check_pairs(op, values, row.size(0), row, edges, differ);
  check_range(op, edges, -1, row.size(0));
  const Tensor held = values.contiguous(), taken = at::empty({edges.size(0), values.size(1)}, values.options());
  AT_DISPATCH_FLOATING_TYPES(values.scalar_type(), "take_pairs", [&] {
    if (take(held.const_data_ptr<scalar_t>(), edges.const_data_ptr<int32_t>(), edges.size(0), values.size(1),
             taken.mutable_data_ptr<scalar_t>()))
      *differ.mutable_data_ptr<double>() = 1;
  });
  return taken;
}

Tensor spread_on_cpu(const Tensor&, int64_t, const Tensor& rows, const Tensor& row, const Tensor& edges) {
  constexpr const char* op = "eqaccel::spread_pairs";
  check_pairs(op, rows, edges.size(0), row, edges);
  check_range(op, edges, -1, row.size(0));
  const Tensor first = edges.select(1, 0).to(at::kLong);
  return at::zeros({row.size(0), rows.size(1)}, rows.options()).index_copy_(0, first, rows);
}

// Everything about these operators that is not a differentiable operand.
struct PairProblem {
  Tensor payload;
  int64_t key;
  Tensor row, edges, differ;  // the last is undefined for the transpose
};

Tensor call(const PairProblem& p, const Tensor& matrix) {
  using Take = Tensor(const Tensor&, int64_t, const Tensor&, const Tensor&, const Tensor&, const Tensor&);
  using Spread = Tensor(const Tensor&, int64_t, const Tensor&, const Tensor&, const Tensor&);
  static const auto take = find_operator<Take>("eqaccel::take_pairs");
  static const auto spread = find_operator<Spread>("eqaccel::spread_pairs");
  return p.differ.defined() ? take.call(p.payload, p.key, matrix, p.row, p.edges, p.differ)
                            : spread.call(p.payload, p.key, matrix, p.row, p.edges);
}

// Either operator as a function of its matrix, in which it is linear.
template <bool takes>
struct PairRows {
  static constexpr auto compute = call;

  static void save(AutogradContext& context, const PairProblem& p, const variable_list&) {
    context.save_for_backward({p.payload, p.row, p.edges});
    context.saved_data["key"] = p.key;
    context.set_materialize_grads(false);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const Tensor& g = gradients[0];
    if (!g.defined()) return {Tensor()};
    const variable_list saved = context->get_saved_variables();
    const Tensor flag = takes ? Tensor() : at::zeros({1}, g.options().dtype(at::kDouble));
    return {call({saved[0], context->saved_data["key"].toInt(), saved[1], saved[2], flag}, g)};
  }

  static variable_list tangents(const PairProblem& p, const variable_list&, const variable_list& along) {
    if (!along[0].defined()) return {Tensor()};
    const Tensor flag = takes ? at::zeros_like(p.differ) : Tensor();
    return {call({p.payload, p.key, p.row, p.edges, flag}, along[0])};
  }
};

Tensor differentiable_take(const Tensor& payload, int64_t key, const Tensor& values, const Tensor& row,
                           const Tensor& edges, const Tensor& differ) {
  return differentiate<PairRows<true>>(PairProblem{payload, key, row, edges, differ}, values);
}

Tensor differentiable_spread(const Tensor& payload, int64_t key, const Tensor& rows, const Tensor& row,
                             const Tensor& edges) {
  return differentiate<PairRows<false>>(PairProblem{payload, key, row, edges, {}}, rows);
}

TORCH_LIBRARY_IMPL(eqaccel, CPU, library) {
  library.impl("take_pairs", take_on_cpu);
  library.impl("spread_pairs", spread_on_cpu);
}
TORCH_LIBRARY_IMPL(eqaccel, Autograd, library) {
  library.impl("take_pairs", differentiable_take);
  library.impl("spread_pairs", differentiable_spread);
}

}  // namespace pair_rows_file
}  // namespace

Tensor take_pairs(const EdgePairs& pairs, const Tensor& values, const Tensor& differ) {
  return pair_rows_file::call({pairs.payload, pairs.key, pairs.row, pairs.edges, differ}, values);
}

}  // namespace eqaccel::ops

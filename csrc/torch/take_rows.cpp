// eqaccel::take_rows and eqaccel::take_columns: torch's index of rows by numbers, x[numbers], and of a column of each row,
// x[arange, columns], with other derivatives. Those of torch put every gradient into zeros after a sort of all numbers, some
// fifteen kernels on a GPU, in each backward pass. Here numbers are sorted already, and columns of different rows need no
// sort. Sums are in the given order, on any device; of very many terms, in pieces of it.
//
// And eqaccel::add_rows: torch's scatter_add of rows, which a GPU adds in whatever order its threads come. Here it is one.
#include <ATen/ATen.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <torch/library.h>

#include <cmath>
#include <optional>
#include <tuple>

#include "differentiate.h"
#include "given_graph.h"
#include "operators.h"

namespace eqaccel::ops {
namespace {
namespace take_rows_file {

using Indices = c10::List<std::optional<Tensor>>;

Tensor rows_at(const Tensor& x, const Tensor& numbers) { return at::index(x, Indices({numbers})); }
Tensor columns_at(const Tensor& x, const Tensor& rows, const Tensor& columns) {
  return at::index(x, Indices({rows, columns}));
}

// Numbers of rows (E,), their places in an order in which equal ones stand together, and where each begins in it. No order
// where they stand so.
struct Rows {
  Tensor numbers, order, starts;

  void save(AutogradContext& context) const { context.save_for_backward({numbers, order, starts}); }
  static Rows saved(AutogradContext& context) {
    const variable_list v = context.get_saved_variables();
    return {v[0], v[1], v[2]};
  }
};

Tensor taken(const Rows&, const Tensor& x);

Tensor segment_sums(const Tensor& terms, const Tensor& starts) {
  return at::segment_reduce(terms, "sum", /*lengths=*/{}, /*indices=*/{}, starts, /*axis=*/0, /*unsafe=*/true,
                            /*initial=*/0);
}

// Sums of terms from each start to the next. A GPU has one thread for each sum, so many terms are added in pieces first.
Tensor sums(const Tensor& terms, const Tensor& starts) {
  constexpr int64_t many = 256;
  const int64_t count = terms.size(0), num_rows = starts.size(0) - 1;
  if (count <= many * num_rows) return segment_sums(terms, starts);
  const auto length = static_cast<int64_t>(std::sqrt(static_cast<double>(count)));
  const Tensor marks = at::arange(0, count, length, starts.options());
  const Tensor begins = std::get<0>(at::cat({starts, marks}).sort());
  return segment_sums(segment_sums(terms, begins), at::searchsorted(begins, starts));
}

// Sums of the rows of a gradient that belong to one row.
struct Sum {
  static Tensor compute(const Rows& rows, const Tensor& g) {
    return sums(rows.order.defined() ? g.index_select(0, rows.order) : g, rows.starts);
  }
  static void save(AutogradContext& context, const Rows& rows, const variable_list&) { rows.save(context); }
  static variable_list backward(AutogradContext* context, const variable_list& incoming) {
    return {taken(Rows::saved(*context), incoming[0])};
  }
  static variable_list tangents(const Rows& rows, const variable_list&, const variable_list& along) {
    return {compute(rows, along[0])};
  }
};

// Gradients of torch.func are more than their values.
bool is_plain(const Tensor& t) { return !at::isTensorSubclassLike(t) && (t.is_cpu() || t.is_cuda()); }

Tensor sum(const Rows& rows, const Tensor& g) {
  if (is_plain(g)) return differentiate<Sum>(rows, g);
  const Tensor zeros = at::zeros_symint({rows.starts.sym_size(0) - 1, g.sym_size(-1)}, g.options());
  return at::index_put(zeros, Indices({rows.numbers}), g, /*accumulate=*/true);
}

struct Taking {
  static Tensor compute(const Rows& rows, const Tensor& x) { return rows_at(x, rows.numbers); }
  static void save(AutogradContext& context, const Rows& rows, const variable_list&) { rows.save(context); }
  static variable_list backward(AutogradContext* context, const variable_list& incoming) {
    return {sum(Rows::saved(*context), incoming[0])};
  }
  static variable_list tangents(const Rows& rows, const variable_list&, const variable_list& along) {
    return {compute(rows, along[0])};
  }
};

Tensor taken(const Rows& rows, const Tensor& x) {
  return is_plain(x) ? differentiate<Taking>(rows, x) : rows_at(x, rows.numbers);
}

void check(const char* op, const Tensor& x, const char* name, const Tensor& numbers, const char* name_of_x = "x") {
  TORCH_CHECK(x.dim() == 2, op, ": argument '", name_of_x, "' must have shape (rows, columns), got ", x.sym_sizes(),
              ".");
  TORCH_CHECK(numbers.dim() == 1 && numbers.scalar_type() == at::kLong && numbers.device() == x.device(), op,
              ": argument '", name, "' must be int64 of one dimension on ", x.device(), ", got ", numbers.scalar_type(),
              " of shape ", numbers.sym_sizes(), " on ", numbers.device(), ".");
}

Tensor compute_rows(const Tensor& x, const Tensor& numbers, const Tensor&, const Tensor&) {
  return rows_at(x, numbers);
}

Tensor take_rows(const Tensor& x, const Tensor& numbers, const Tensor& order, const Tensor& starts) {
  constexpr const char* op = "eqaccel::take_rows";
  check(op, x, "numbers", numbers);
  TORCH_CHECK(order.sym_sizes() == numbers.sym_sizes() && starts.dim() == 1 && starts.sym_size(0) == x.sym_size(0) + 1,
              op, ": arguments 'order' and 'starts' must have shapes ", numbers.sym_sizes(), " and (",
              x.sym_size(0) + 1, ",), got ", order.sym_sizes(), " and ", starts.sym_sizes(),
              ". Pass those of the graph of the edges.");
  // Derivatives of what holds nothing are torch's own.
  if (!records_gradient(x) || !is_plain(x) || !is_plain(numbers) || x.numel() == 0) return rows_at(x, numbers);
  return differentiate<Taking>(Rows{numbers, order, starts}, x);
}

// Torch's own sum, for a CPU, which has one order, and where derivatives have to be torch's.
Tensor added_by_torch(const Tensor& values, const Tensor& numbers, const c10::SymInt& num_rows) {
  const Tensor zeros = at::zeros_symint({num_rows, values.sym_size(1)}, values.options());
  return at::scatter_add(zeros, 0, numbers.unsqueeze(1).expand_symint(values.sym_sizes()), values);
}

std::tuple<Tensor, Tensor> sort_rows(const Tensor& numbers, c10::SymInt num_rows) {
  const auto [sorted, order] = numbers.sort(std::optional<bool>(true), /*dim=*/0);  // a stable one
  // torch's own sums end with an error too, which is the device's on a GPU.
  if (is_plain(sorted) && sorted.numel() > 0)
    at::_assert_async((sorted[0] >= 0).logical_and(sorted[-1] < num_rows.expect_int()),
                      "eqaccel::sort_rows: expected numbers from zero to those of the last row");
  return {order, at::searchsorted(sorted, at::arange(num_rows.expect_int() + 1, numbers.options()))};
}

bool has_own_sum(const Tensor& values, const Tensor& numbers, const std::optional<Tensor>& order) {
  return (values.is_cuda() || order) && is_plain(values) && is_plain(numbers) && values.numel() > 0;
}

Rows ordered(const Tensor& numbers, int64_t num_rows, const std::optional<Tensor>& order,
             const std::optional<Tensor>& starts) {
  if (order) return {numbers, *order, *starts};
  if (GivenGraph* const given = GivenGraph::current(); given != nullptr && given->are_receivers(numbers, num_rows))
    return {numbers, Tensor(), given->starts()};
  const auto [places, begins] = sort_rows(numbers, num_rows);
  return {numbers, places, begins};
}

Tensor compute_sums(const Tensor& values, const Tensor& numbers, c10::SymInt num_rows,
                    const std::optional<Tensor>& order, const std::optional<Tensor>& starts) {
  if (!has_own_sum(values, numbers, order)) return added_by_torch(values, numbers, num_rows);
  return Sum::compute(ordered(numbers, num_rows.expect_int(), order, starts), values);
}

Tensor add_rows(const Tensor& values, const Tensor& numbers, c10::SymInt num_rows, const std::optional<Tensor>& order,
                const std::optional<Tensor>& starts) {
  constexpr const char* op = "eqaccel::add_rows";
  check(op, values, "numbers", numbers, "values");
  TORCH_CHECK(numbers.sym_size(0) == values.sym_size(0), op, ": argument 'numbers' must have one for each of the ",
              values.sym_size(0), " rows of 'values', got ", numbers.sym_size(0), ".");
  const auto fit = [&] {
    return order->sym_sizes() == numbers.sym_sizes() && starts->dim() == 1 && starts->sym_size(0) == num_rows + 1;
  };
  TORCH_CHECK(order.has_value() == starts.has_value() && (!order || fit()), op,
              ": arguments 'order' and 'starts' must have shapes ", numbers.sym_sizes(), " and (", num_rows + 1,
              ",), or both be left out. Pass those of the graph of the edges.");
  if (!has_own_sum(values, numbers, order)) return added_by_torch(values, numbers, num_rows);
  return differentiate<Sum>(ordered(numbers, num_rows.expect_int(), order, starts), values);
}

// The gradient goes to one column of each row.
struct Columns {
  struct Places {
    Tensor rows, columns;
  };
  static Tensor compute(const Places& p, const Tensor& x) { return columns_at(x, p.rows, p.columns); }
  static void save(AutogradContext& context, const Places& p, const variable_list& operands) {
    context.save_for_backward({p.columns});
    context.saved_data["count"] = operands[0].size(1);
  }
  static variable_list backward(AutogradContext* context, const variable_list& incoming) {
    const int64_t count = context->saved_data["count"].toInt();
    const Tensor g = incoming[0].unsqueeze(-1);
    if (count == 1) return {g};
    const Tensor columns = context->get_saved_variables()[0].remainder(count).unsqueeze(-1);
    return {at::scatter(at::zeros_symint({columns.sym_size(0), count}, g.options()), 1, columns, g)};
  }
  static variable_list tangents(const Places& p, const variable_list&, const variable_list& along) {
    return {compute(p, along[0])};
  }
};

Tensor take_columns(const Tensor& x, const Tensor& rows, const Tensor& columns) {
  constexpr const char* op = "eqaccel::take_columns";
  check(op, x, "rows", rows);
  check(op, x, "columns", columns);
  TORCH_CHECK(rows.sym_size(0) == x.sym_size(0) && columns.sym_size(0) == x.sym_size(0), op,
              ": arguments 'rows' and 'columns' must have a number for each of the ", x.sym_size(0),
              " rows of 'x', got ", rows.sym_size(0), " and ", columns.sym_size(0), ".");
  if (!records_gradient(x) || !is_plain(x) || !is_plain(columns) || x.numel() == 0) return columns_at(x, rows, columns);
  return differentiate<Columns>(Columns::Places{rows, columns}, x);
}

TORCH_LIBRARY_IMPL(eqaccel, CompositeExplicitAutograd, library) {
  library.impl("take_rows", compute_rows);
  library.impl("take_columns", columns_at);
  library.impl("add_rows", compute_sums);
  library.impl("sort_rows", sort_rows);
}
TORCH_LIBRARY_IMPL(eqaccel, Autograd, library) {
  library.impl("take_rows", take_rows);
  library.impl("take_columns", take_columns);
  library.impl("add_rows", add_rows);
}

}  // namespace take_rows_file
}  // namespace
}  // namespace eqaccel::ops

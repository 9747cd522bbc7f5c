// eqaccel::take_rows and eqaccel::take_columns: torch's index of rows by numbers, x[numbers], and of a column of each row,
// x[arange, columns], with other derivatives. Those of torch put every gradient into zeros after a sort of all numbers, some
// fifteen kernels on a GPU, in each backward pass. Here numbers are sorted already, and columns of different rows need no
// sort. Sums are in the given order, on any device.
#include <ATen/ATen.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <torch/library.h>

#include <optional>

#include "differentiate.h"
#include "operators.h"

namespace eqaccel::ops {
namespace {
namespace take_rows_file {

using Indices = c10::List<std::optional<Tensor>>;

Tensor rows_at(const Tensor& x, const Tensor& numbers) { return at::index(x, Indices({numbers})); }
Tensor columns_at(const Tensor& x, const Tensor& rows, const Tensor& columns) {
  return at::index(x, Indices({rows, columns}));
}

// Numbers of rows (E,), their places in an order in which equal ones stand together, and where each begins in it.
struct Rows {
  Tensor numbers, order, starts;

  void save(AutogradContext& context) const { context.save_for_backward({numbers, order, starts}); }
  static Rows saved(AutogradContext& context) {
    const variable_list v = context.get_saved_variables();
    return {v[0], v[1], v[2]};
  }
};

Tensor taken(const Rows&, const Tensor& x);

// Sums of the rows of a gradient that belong to one row.
struct Sum {
  static Tensor compute(const Rows& rows, const Tensor& g) {
    return at::segment_reduce(g.index_select(0, rows.order), "sum", /*lengths=*/{}, /*indices=*/{}, rows.starts,
                              /*axis=*/0, /*unsafe=*/true, /*initial=*/0);
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

void check(const char* op, const Tensor& x, const char* name, const Tensor& numbers) {
  TORCH_CHECK(x.dim() == 2, op, ": argument 'x' must have shape (rows, columns), got ", x.sym_sizes(), ".");
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
}
TORCH_LIBRARY_IMPL(eqaccel, Autograd, library) {
  library.impl("take_rows", take_rows);
  library.impl("take_columns", take_columns);
}

}  // namespace take_rows_file
}  // namespace
}  // namespace eqaccel::ops

// eqaccel::permute_columns: columns in another order. Its derivative is the same with the inverse order, so that each is
// one kernel, where slices and concatenations take one for each part and two for the gradient of a slice.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include "differentiate.h"
#include "operators.h"

namespace eqaccel::ops {
namespace {
namespace columns_file {

struct Orders {
  Tensor order, inverse;
};

Tensor call(const Orders& orders, const Tensor& x) {
  using Signature = Tensor(const Tensor&, const Tensor&, const Tensor&);
  static const auto op = find_operator<Signature>("eqaccel::permute_columns");
  return op.call(x, orders.order, orders.inverse);
}

void check(const Tensor& x, const Tensor& order, const Tensor& inverse) {
  constexpr const char* op = "eqaccel::permute_columns";
  TORCH_CHECK(x.dim() == 2, op, ": argument 'x' must have shape (rows, columns), got ", x.sym_sizes(),
              ". Flatten leading dimensions with .flatten(0, -2).");
  for (const auto& [name, numbers] : {std::pair("order", &order), std::pair("inverse", &inverse)})
    TORCH_CHECK(numbers->dim() == 1 && numbers->sym_size(0) == x.sym_size(1) && numbers->scalar_type() == at::kLong &&
                    numbers->device() == x.device(),
                op, ": argument '", name, "' must be int64 of shape (", x.sym_size(1), ",) on ", x.device(), ", got ",
                numbers->scalar_type(), " of shape ", numbers->sym_sizes(), " on ", numbers->device(),
                ". Pass a permutation of the columns.");
}

Tensor on_gpu(const Tensor& x, const Tensor& order, const Tensor& inverse) {
  check(x, order, inverse);
  return x.index_select(1, order);
}

Tensor on_cpu(const Tensor& x, const Tensor& order, const Tensor& inverse) {
  check(x, order, inverse);
  const Tensor from = x.contiguous(), numbers = order.contiguous(), result = at::empty_like(from);
  const int64_t columns = from.size(1), *const column = numbers.const_data_ptr<int64_t>();
  for (int64_t n = 0; n < columns; ++n)
    TORCH_CHECK(column[n] >= 0 && column[n] < columns,
                "eqaccel::permute_columns: argument 'order' must hold columns, 0 to ", columns - 1, ", got ", column[n],
                ". Pass a permutation of the columns.");
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, from.scalar_type(), "permute_columns", [&] {
    const scalar_t* const source = from.const_data_ptr<scalar_t>();
    scalar_t* const target = result.mutable_data_ptr<scalar_t>();
    const int64_t rows_at_a_time = std::max<int64_t>(1, at::internal::GRAIN_SIZE / std::max<int64_t>(columns, 1));
    at::parallel_for(0, from.size(0), rows_at_a_time, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        for (int64_t n = 0; n < columns; ++n) target[row * columns + n] = source[row * columns + column[n]];
    });
  });
  return result;
}

Tensor on_meta(const Tensor& x, const Tensor& order, const Tensor& inverse) {
  check(x, order, inverse);
  return stand_in(x);
}

struct Permutation {
  static constexpr auto compute = call;

  static void save(AutogradContext& context, const Orders& orders, const variable_list&) {
    context.save_for_backward({orders.order, orders.inverse});
  }

  static variable_list backward(AutogradContext* context, const variable_list& incoming) {
    const variable_list v = context->get_saved_variables();
    return {call({v[1], v[0]}, incoming[0])};
  }

  static variable_list tangents(const Orders& orders, const variable_list&, const variable_list& along) {
    return {call(orders, along[0])};
  }
};

Tensor differentiable(const Tensor& x, const Tensor& order, const Tensor& inverse) {
  return differentiate<Permutation>(Orders{order, inverse}, x);
}

TORCH_LIBRARY_IMPL(eqaccel, CPU, library) { library.impl("permute_columns", on_cpu); }
TORCH_LIBRARY_IMPL(eqaccel, CUDA, library) { library.impl("permute_columns", on_gpu); }
TORCH_LIBRARY_IMPL(eqaccel, Meta, library) { library.impl("permute_columns", on_meta); }
TORCH_LIBRARY_IMPL(eqaccel, Autograd, library) { library.impl("permute_columns", differentiable); }

}  // namespace columns_file
}  // namespace
}  // namespace eqaccel::ops

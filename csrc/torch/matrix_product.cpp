// eqaccel::matrix_product: a b, as torch's product but on CPUs, and for float32 on GPUs whose tensor cores are faster
// (runtime/matrix_product.cpp), with errors of the same size, or with those of single products of TensorFloat-32 if the
// program says so. Where torch may use TensorFloat-32 in place of three products, or the kernel does not take the operands
// (runtime/matrix_product.h), it is torch's product on these GPUs too. The derivative with respect to `a` is another call
// of the operator, that with respect to `b` a product of torch.
#include "matrix_product.h"

#include <ATen/Context.h>
#include <torch/library.h>

#include <optional>

#include "device.h"
#include "differentiate.h"
#include "kernel_call.h"
#include "operators.h"

namespace eqaccel::ops {
namespace {

struct Source {
  Tensor payload;
  int64_t key;
};

Tensor call(const Source& s, const Tensor& a, const Tensor& b) {
  using Signature = Tensor(const Tensor&, int64_t, const Tensor&, const Tensor&);
  static const auto op = find_operator<Signature>("eqaccel::matrix_product");
  return op.call(s.payload, s.key, a, b);
}

void check(const Tensor& a, const Tensor& b) {
  constexpr const char* op = "eqaccel::matrix_product";
  TORCH_CHECK(a.dim() == 2, op, ": argument 'a' must have shape (rows, terms), got ", a.sym_sizes(),
              ". Flatten leading dimensions with .flatten(0, -2).");
  TORCH_CHECK(b.dim() == 2 && b.sym_size(0) == a.sym_size(1), op, ": argument 'b' must have shape (terms, columns) = (",
              a.sym_size(1), ", columns), got ", b.sym_sizes(), ". Check the columns of 'a' and the rows of 'b'.");
  TORCH_CHECK(b.device() == a.device() && b.scalar_type() == a.scalar_type(), op, ": argument 'b' must be ",
              a.scalar_type(), " on ", a.device(), ", like 'a', got ", b.scalar_type(), " on ", b.device(),
              ". Convert it with .to(a).");
}

// What the kernel of a program is compiled for where it multiplies float32 on a device; nothing where torch does.
std::optional<std::string> kernel_arch(const Program& program, at::Device device) {
  const bool torch_rounds = at::globalContext().allowTF32CuBLAS() && MatrixProduct::products(program) > 1;
  if (torch_rounds) return std::nullopt;
  return MatrixProduct::compile_arch(program, GpuDriver::get(Backend::cuda).arch(device.index()));
}

Tensor on_gpu(const Tensor& payload, int64_t key, const Tensor& a, const Tensor& b) {
  check(a, b);
  if (a.scalar_type() != at::kFloat || backend_of(a.device()) != Backend::cuda) return at::mm(a, b);
  const auto program = program_of("eqaccel::matrix_product", payload, key);
  const auto arch = translating_errors([&] { return kernel_arch(*program, a.device()); });
  if (!arch) return at::mm(a, b);
  const c10::DeviceGuard guard(a.device());
  const Tensor rows = a.contiguous(), c = at::empty({a.size(0), b.size(1)}, a.options());
  const Matrices matrices{rows.const_data_ptr<float>(),
                          b.const_data_ptr<float>(),
                          c.mutable_data_ptr<float>(),
                          a.size(0),
                          b.size(1),
                          a.size(1),
                          b.stride(0),
                          b.stride(1)};
  if (!MatrixProduct::takes(matrices)) return at::mm(a, b);
  translating_errors([&] {
    const MatrixProduct& kernel = MatrixProduct::get(*program, a.device().index(), *arch);
    const Tensor workspace =
        at::empty({static_cast<int64_t>(kernel.workspace_bytes(matrices))}, a.options().dtype(at::kByte));
    kernel.launch(matrices, workspace.mutable_data_ptr(), current_stream(a.device()));
  });
  return c;
}

// The kernel of preludes/cpu_matrix_product.h. Its result takes memory that earlier ones have given back: fresh memory
// would take as long to map as the weights of edges take to multiply.
class HostProduct : public KernelCall {
 public:
  HostProduct(const char* op, const Tensor& payload, int64_t key, const Tensor& a, const Tensor& b, int64_t rows)
      : KernelCall(op, payload, key, a), result_(empty_kept({rows, b.size(1)}, a.options())) {
    ops_.num_edges = rows;
    ops_.num_senders = a.size(1);
    ops_.w_stride = b.size(1);
    ops_.x = held(a);
    ops_.w = held(b);
    ops_.z = result_.mutable_data_ptr();
  }

  // `parts`: (rows, 2) of whose rows of `a` those are the sums that are multiplied; null if they are the rows themselves.
  Tensor launch(const int32_t* parts = nullptr) {
    run(Direction::forward, parts);
    return result_;
  }

 private:
  Tensor result_;
};

Tensor on_cpu(const Tensor& payload, int64_t key, const Tensor& a, const Tensor& b) {
  check(a, b);
  const bool has_scalar = a.scalar_type() == at::kFloat || a.scalar_type() == at::kDouble;
  if (!has_scalar || a.numel() == 0 || b.numel() == 0) return at::mm(a, b);
  return HostProduct("eqaccel::matrix_product", payload, key, a, b, a.size(0)).launch();
}

Tensor on_cpu_shared(const Tensor& payload, int64_t key, const Tensor& a, const Tensor& b, const Tensor& parts) {
  constexpr const char* op = "eqaccel::matrix_product_shared";
  check(a, b);
  TORCH_CHECK(parts.is_cpu() && parts.scalar_type() == at::kInt && parts.dim() == 2 && parts.size(1) == 2, op,
              ": argument 'parts' must be int32 of shape (rows, 2) on the CPU, got ", parts.scalar_type(), " of shape ",
              parts.sizes(), " on ", parts.device(), ". Pass the edges of eqaccel::edge_pairs.");
  const Tensor kept = parts.contiguous();
  const int32_t* numbers = kept.const_data_ptr<int32_t>();
  const int64_t rows = parts.size(0), count = a.size(0);
  for (int64_t n = 0; n < 2 * rows; ++n)
    TORCH_CHECK(numbers[n] >= -(n % 2) && numbers[n] < count, op, ": argument 'parts' must hold rows of 'a', 0 to ",
                count - 1, ", or -1 for no second one, got ", numbers[n], " in row ", n / 2,
                ". Pass the edges of the graph that 'a' has a row of for each.");
  if (rows == 0 || a.numel() == 0 || b.numel() == 0) return at::zeros({rows, b.size(1)}, a.options());
  return HostProduct(op, payload, key, a, b, rows).launch(numbers);
}

Tensor on_meta(const Tensor&, int64_t, const Tensor& a, const Tensor& b) {
  check(a, b);
  return at::mm(a, b);
}

// torch's own product knows what autocast makes of its operands.
Tensor under_autocast(const Tensor&, int64_t, const Tensor& a, const Tensor& b) { return at::mm(a, b); }

// Bilinear.
struct Product {
  static constexpr bool is_traceable = false;

  static constexpr auto compute = call;

  static void save(AutogradContext& context, const Source& s, variable_list operands) {
    operands.push_back(s.payload);
    context.save_for_backward(std::move(operands));
    context.saved_data["key"] = s.key;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const Tensor &a = saved[0], &b = saved[1], &g = gradients[0];
    const Source s{saved[2], context->saved_data["key"].toInt()};
    variable_list results(2);
    if (context->needs_input_grad(0)) results[0] = call(s, g, b.t());
    // In the layout of `b`: what is transposed back to that of a parameter is its gradient without a copy.
    const bool by_columns = b.sym_stride(0) == 1 && b.sym_size(1) > 1;
    if (context->needs_input_grad(1)) results[1] = by_columns ? at::mm(g.t(), a).t() : at::mm(a.t(), g);
    return results;
  }

  static variable_list tangents(const Source& s, const variable_list& v, const variable_list& along) {
    variable_list sum(1);
    if (along[0].defined()) add(sum[0], call(s, along[0], v[1]));
    if (along[1].defined()) add(sum[0], call(s, v[0], along[1]));
    return sum;
  }
};

Tensor differentiable(const Tensor& payload, int64_t key, const Tensor& a, const Tensor& b) {
  return differentiate<Product>(Source{payload, key}, a, b);
}

TORCH_LIBRARY_IMPL(eqaccel, Autograd, library) { library.impl("matrix_product", differentiable); }
TORCH_LIBRARY_IMPL(eqaccel, CUDA, library) { library.impl("matrix_product", on_gpu); }
TORCH_LIBRARY_IMPL(eqaccel, CPU, library) {
  library.impl("matrix_product", on_cpu);
  library.impl("matrix_product_shared", on_cpu_shared);
}
TORCH_LIBRARY_IMPL(eqaccel, Meta, library) { library.impl("matrix_product", on_meta); }
TORCH_LIBRARY_IMPL(eqaccel, AutocastCPU, library) { library.impl("matrix_product", under_autocast); }
TORCH_LIBRARY_IMPL(eqaccel, AutocastCUDA, library) { library.impl("matrix_product", under_autocast); }

}  // namespace
}  // namespace eqaccel::ops

// eqaccel::matrix_product: a b, as torch's product but on CPUs, and for float32 on GPUs whose tensor cores are faster
// (runtime/matrix_product.cpp), with errors of the same size, or with those of single products of half precision if the
// program says so. Where torch may use TensorFloat-32 in place of three products, or the kernel does not take the operands
// (runtime/matrix_product.h), it is torch's product on these GPUs too. The derivative with respect to `a` is another call
// of the operator, that with respect to `b` a product of torch.
//
// eqaccel::matrix_product_shared: the same of sums of two rows of `a`, without derivatives; where the kernel does not add
// rows, they are added before.
#include "matrix_product.h"

#include <ATen/Context.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <torch/library.h>

#include <optional>

#include "device.h"
#include "differentiate.h"
#include "edge_pairs.h"
#include "kernel_call.h"
#include "operators.h"
#include "product_recipe.h"
#include "silu.h"

namespace eqaccel::ops {
namespace {

constexpr const char* op_name = "eqaccel::matrix_product";
constexpr const char* shared_name = "eqaccel::matrix_product_shared";

void check(const Tensor& a, const Tensor& b) {
  TORCH_CHECK(a.dim() == 2, op_name, ": argument 'a' must have shape (rows, terms), got ", a.sym_sizes(),
              ". Flatten leading dimensions with .flatten(0, -2).");
  TORCH_CHECK(b.dim() == 2 && b.sym_size(0) == a.sym_size(1), op_name,
              ": argument 'b' must have shape (terms, columns) = (", a.sym_size(1), ", columns), got ", b.sym_sizes(),
              ". Check the columns of 'a' and the rows of 'b'.");
  TORCH_CHECK(b.device() == a.device() && b.scalar_type() == a.scalar_type(), op_name, ": argument 'b' must be ",
              a.scalar_type(), " on ", a.device(), ", like 'a', got ", b.scalar_type(), " on ", b.device(),
              ". Convert it with .to(a).");
}

// What the kernel of a program is compiled for where it multiplies float32 on a device; nothing where torch does.
std::optional<std::string> kernel_arch(const Program& program, at::Device device) {
  const bool torch_rounds = at::globalContext().allowTF32CuBLAS() && MatrixProduct::products(program) > 1;
  if (torch_rounds) return std::nullopt;
  return MatrixProduct::compile_arch(program, GpuDriver::get(Backend::cuda).arch(device.index()));
}

void check_summands(const Tensor& a, const Tensor& summands) {
  TORCH_CHECK(summands.device() == a.device() && summands.scalar_type() == at::kInt && summands.dim() == 2 &&
                  summands.size(1) == 2,
              shared_name, ": argument 'summands' must be int32 of shape (rows, 2) on ", a.device(), ", got ",
              summands.scalar_type(), " of shape ", summands.sizes(), " on ", summands.device(),
              ". Pass the edges of eqaccel::edge_pairs.");
}

bool may_multiply(const Tensor& a) { return a.scalar_type() == at::kFloat && backend_of(a.device()) == Backend::cuda; }

// What has no value where no kernel takes the operands. `summands`: contiguous; undefined if rows are not added. `into`:
// contiguous; undefined if the result is a new tensor.
std::optional<Tensor> by_kernel(const char* op, const Tensor& payload, int64_t key, const Tensor& a, const Tensor& b,
                                const Tensor& summands, const Tensor& into = {}) {
  if (!may_multiply(a)) return std::nullopt;
  const bool adds = summands.defined();
  const auto program = program_of(op, payload, key);
  const auto arch = translating_errors([&] { return kernel_arch(*program, a.device()); });
  if (!arch || (adds && !MatrixProduct::adds_rows(*program, *arch))) return std::nullopt;
  const c10::DeviceGuard guard(a.device());
  const int64_t count = adds ? summands.size(0) : a.size(0);
  const Tensor rows = a.contiguous(), c = into.defined() ? into : at::empty({count, b.size(1)}, a.options());
  const Matrices matrices{rows.const_data_ptr<float>(),
                          b.const_data_ptr<float>(),
                          c.mutable_data_ptr<float>(),
                          count,
                          b.size(1),
                          a.size(1),
                          b.stride(0),
                          b.stride(1),
                          adds ? summands.const_data_ptr<int32_t>() : nullptr};
  if (!MatrixProduct::takes(matrices)) return std::nullopt;
  translating_errors([&] {
    const MatrixProduct& kernel = MatrixProduct::get(*program, a.device().index(), *arch);
    const Tensor workspace =
        at::empty({static_cast<int64_t>(kernel.workspace_bytes(matrices))}, a.options().dtype(at::kByte));
    kernel.launch(matrices, workspace.mutable_data_ptr(), current_stream(a.device()));
  });
  return c;
}

Tensor on_gpu(const Tensor& payload, int64_t key, const Tensor& a, const Tensor& b) {
  check(a, b);
  const std::optional<Tensor> c = by_kernel(op_name, payload, key, a, b, {});
  return c ? *c : at::mm(a, b);
}

// Numbers of rows are not checked: that would wait for the device.
Tensor on_gpu_shared(const Tensor& payload, int64_t key, const Tensor& a, const Tensor& b, const Tensor& summands) {
  check(a, b);
  check_summands(a, summands);
  if (a.numel() == 0) return at::zeros({summands.size(0), b.size(1)}, a.options());
  const std::optional<Tensor> c = by_kernel(shared_name, payload, key, a, b, summands.contiguous());
  return c ? *c : on_gpu(payload, key, sums_of_rows(a, summands), b);
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

  // `summands`: (rows, 2) of `a`, of whose rows those that are multiplied are sums; null if they are the rows themselves.
  Tensor launch(const int32_t* summands = nullptr) {
    run(Direction::forward, summands);
    return result_;
  }

 private:
  Tensor result_;
};

Tensor on_cpu(const Tensor& payload, int64_t key, const Tensor& a, const Tensor& b) {
  check(a, b);
  const bool has_scalar = a.scalar_type() == at::kFloat || a.scalar_type() == at::kDouble;
  if (!has_scalar || a.numel() == 0 || b.numel() == 0) return at::mm(a, b);
  return HostProduct(op_name, payload, key, a, b, a.size(0)).launch();
}

Tensor on_cpu_shared(const Tensor& payload, int64_t key, const Tensor& a, const Tensor& b, const Tensor& summands) {
  check(a, b);
  check_summands(a, summands);
  const Tensor kept = summands.contiguous();
  const int32_t* numbers = kept.const_data_ptr<int32_t>();
  const int64_t rows = summands.size(0), count = a.size(0);
  for (int64_t n = 0; n < 2 * rows; ++n)
    TORCH_CHECK(numbers[n] >= -2 * (n % 2) && numbers[n] < count, shared_name,
                ": argument 'summands' must hold rows of 'a', 0 to ", count - 1,
                ", or -1 for no second one and -2 for zeros, got ", numbers[n], " in row ", n / 2,
                ". Pass the edges of the graph that 'a' has a row of for each.");
  if (rows == 0 || a.numel() == 0 || b.numel() == 0) return at::zeros({rows, b.size(1)}, a.options());
  return HostProduct(shared_name, payload, key, a, b, rows).launch(numbers);
}

Tensor on_meta(const Tensor&, int64_t, const Tensor& a, const Tensor& b) {
  check(a, b);
  return stand_in({a.sym_size(0), b.sym_size(1)}, a);
}

Tensor on_meta_shared(const Tensor&, int64_t, const Tensor& a, const Tensor& b, const Tensor& summands) {
  check(a, b);
  check_summands(a, summands);
  return stand_in({summands.sym_size(0), b.sym_size(1)}, a);
}

// torch's own product knows what autocast makes of its operands.
Tensor under_autocast(const Tensor&, int64_t, const Tensor& a, const Tensor& b) { return at::mm(a, b); }

int64_t bytes(const Tensor& t) { return t.numel() * static_cast<int64_t>(t.element_size()); }

// Whether a tensor is its values alone: those of torch.func and of tracing are more, and so are dual ones.
bool is_plain(const Tensor& t) { return !at::isTensorSubclassLike(t) && !has_tangent(t); }

// Where a tensor is in the graph of autograd, for what stands in its place later.
struct Place : torch::CustomClassHolder {
  explicit Place(torch::autograd::Edge edge) : edge(std::move(edge)) {}
  torch::autograd::Edge edge;
};

// The operand `a` of a product, kept for the gradient of `b`. Activations of many edges, and their gradients, are not
// kept but made again: what they are made of is kept anyway, and in training on forces this halves what is kept of the
// hidden layers.
struct KeptOperand {
  static constexpr int64_t large = 8 << 20;  // bytes from which on memory is worth a kernel

  static void save(AutogradContext& context, const Tensor& a, variable_list& saved) {
    const auto recipe = is_plain(a) && bytes(a) >= large ? silu_recipe(a) : std::nullopt;
    if (!recipe) {
      saved.push_back(a);
      return;
    }
    saved.insert(saved.end(), recipe->operands.begin(), recipe->operands.end());
    saved.push_back(recipe->source.payload);
    auto& data = context.saved_data;
    data["silu_key"] = recipe->source.key;
    data["silu_factor"] = recipe->source.factor;
    data["silu_scale"] = recipe->source.scale;
    data["silu_place"] = c10::IValue::make_capsule(c10::make_intrusive<Place>(torch::autograd::impl::gradient_edge(a)));
  }

  static Tensor restore(const ProductRecipe::Data& data, variable_list kept) {
    if (data.find("silu_key") == data.end()) return kept[0];
    const SiluSource source{kept.back(), data.at("silu_key").toInt(), data.at("silu_factor").toDouble(),
                            data.at("silu_scale").toDouble()};
    kept.pop_back();
    const Tensor a = SiluRecipe{source, std::move(kept)}.make();
    // As if it had been kept: gradients reach the tensor that it stands for.
    torch::autograd::impl::set_gradient_edge(
        a, c10::static_intrusive_pointer_cast<Place>(data.at("silu_place").toCapsule())->edge);
    return a;
  }
};

// Bilinear.
struct Multiplication {
  static constexpr auto compute = multiply;

  // Each operand is for the gradient of the other.
  static void save(AutogradContext& context, const Product& s, const variable_list& operands) {
    variable_list saved{operands[1], s.payload};  // as `remake` reads them
    if (operands[1].requires_grad()) KeptOperand::save(context, operands[0], saved);
    context.save_for_backward(std::move(saved));
    context.saved_data["key"] = s.key;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const Tensor &b = saved[0], &g = gradients[0];
    const Product s{saved[1], context->saved_data["key"].toInt()};
    variable_list results(2);
    if (context->needs_input_grad(0)) results[0] = multiply(s, g, b.t());
    if (!context->needs_input_grad(1)) return results;
    const Tensor a = KeptOperand::restore(context->saved_data, {saved.begin() + 2, saved.end()});
    // In the layout of `b`: what is transposed back to that of a parameter is its gradient without a copy.
    const bool by_columns = b.sym_stride(0) == 1 && b.sym_size(1) > 1;
    results[1] = by_columns ? at::mm(g.t(), a).t() : at::mm(a.t(), g);
    return results;
  }

  // The product again, of what was saved.
  static Tensor remake(const ProductRecipe::Data& data, const variable_list& saved) {
    const Tensor a = KeptOperand::restore(data, {saved.begin() + 2, saved.end()});
    return multiply(Product{saved[1], data.at("key").toInt()}, a, saved[0]);
  }

  static variable_list tangents(const Product& s, const variable_list& v, const variable_list& along) {
    variable_list sum(1);
    if (along[0].defined()) add(sum[0], multiply(s, along[0], v[1]));
    if (along[1].defined()) add(sum[0], multiply(s, v[0], along[1]));
    return sum;
  }
};

Tensor differentiable(const Tensor& payload, int64_t key, const Tensor& a, const Tensor& b) {
  return differentiate<Multiplication>(Product{payload, key}, a, b);
}

TORCH_LIBRARY_IMPL(eqaccel, Autograd, library) { library.impl("matrix_product", differentiable); }
TORCH_LIBRARY_IMPL(eqaccel, CUDA, library) {
  library.impl("matrix_product", on_gpu);
  library.impl("matrix_product_shared", on_gpu_shared);
}
TORCH_LIBRARY_IMPL(eqaccel, CPU, library) {
  library.impl("matrix_product", on_cpu);
  library.impl("matrix_product_shared", on_cpu_shared);
}
TORCH_LIBRARY_IMPL(eqaccel, Meta, library) {
  library.impl("matrix_product", on_meta);
  library.impl("matrix_product_shared", on_meta_shared);
}
TORCH_LIBRARY_IMPL(eqaccel, AutocastCPU, library) { library.impl("matrix_product", under_autocast); }
TORCH_LIBRARY_IMPL(eqaccel, AutocastCUDA, library) { library.impl("matrix_product", under_autocast); }

// Bytes from which on memory is worth a product, which takes a GPU little longer than to write its result.
int64_t worth_a_product(const Tensor& t) { return t.is_cpu() ? 256 << 20 : 32 << 20; }

}  // namespace

Tensor multiply(const Product& product, const Tensor& a, const Tensor& b) {
  using Signature = Tensor(const Tensor&, int64_t, const Tensor&, const Tensor&);
  static const auto op = find_operator<Signature>(op_name);
  return op.call(product.payload, product.key, a, b);
}

Tensor sums_of_rows(const Tensor& a, const Tensor& summands) {
  const Tensor first = summands.select(1, 0), second = summands.select(1, 1), zero = at::zeros({}, a.options());
  const Tensor sums = at::where(second.gt(-2).unsqueeze(1), a.index_select(0, first), zero);
  return sums + at::where(second.ge(0).unsqueeze(1), a.index_select(0, second.clamp_min(0)), zero);
}

void multiply_into(const Product& product, const Tensor& a, const Tensor& b, const Tensor& c) {
  if (!by_kernel(op_name, product.payload, product.key, a, b, {}, c)) c.copy_(multiply(product, a, b));
}

bool adds_rows(const Product& product, const Tensor& a) {
  if (a.is_cpu()) return true;
  if (!a.is_cuda() || !may_multiply(a)) return false;
  const auto program = program_of(op_name, product.payload, product.key);
  const auto arch = translating_errors([&] { return kernel_arch(*program, a.device()); });
  return arch && MatrixProduct::adds_rows(*program, *arch);
}

ProductRecipe::ProductRecipe(const Tensor& result, Data data)
    : data_(std::move(data)), edge_(torch::autograd::impl::gradient_edge(result)) {}

Tensor ProductRecipe::make(const variable_list& operands) const {
  const Tensor result = [&] {
    const at::NoGradGuard values_alone;
    return Multiplication::remake(data_, operands);
  }();
  torch::autograd::impl::set_gradient_edge(result, edge_);
  return result;
}

Tensor ProductRecipe::make_anew(const variable_list& operands) const {
  return at::GradMode::is_enabled() && is_out_of_reach() ? Multiplication::remake(data_, operands) : make(operands);
}

// A tensor refers to the node that made it, as do those who go on from it, Python among them.
bool ProductRecipe::is_out_of_reach() const {
  constexpr auto referring = 2;  // this, and the node that has the recipe
  torch::autograd::Node& node = *edge_.function;
  return edge_.function.use_count() == referring && node.pre_hooks().empty() && node.post_hooks().empty() &&
         node.tensor_pre_hooks().empty() && node.retains_grad_hooks().empty();
}

std::optional<std::pair<c10::intrusive_ptr<ProductRecipe>, variable_list>> product_recipe(const Tensor& t) {
  if (!is_plain(t) || !t.grad_fn() || t._version() > 0 || bytes(t) < worth_a_product(t)) return std::nullopt;
  AutogradContext* const context = context_of(t.grad_fn().get(), Multiplication::backward);
  if (context == nullptr) return std::nullopt;
  try {
    variable_list saved = context->get_saved_variables();
    if (saved.size() <= 2) return std::nullopt;  // the left operand was not needed
    return std::pair(c10::make_intrusive<ProductRecipe>(t, context->saved_data), std::move(saved));
  } catch (const c10::Error&) {  // a backward pass has given them back
    return std::nullopt;
  }
}

}  // namespace eqaccel::ops

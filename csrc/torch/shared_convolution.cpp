// eqaccel::shared_convolution: a convolution whose edges share the weights of their pairs. Where these take too much
// memory, they are made for one range of pairs after another; where their gradients do, which edges have each for
// themselves, these are made for some edges after the other. Results are bitwise reproducible for the same portions.
#include "shared_convolution.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <vector>

#include "tensor_product.h"

namespace eqaccel::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// One layer in an evaluation; its weights are kept by a number.
class Layer : public torch::CustomClassHolder {
 public:
  explicit Layer(c10::intrusive_ptr<SharedLayer> of)
      : of_(std::move(of)), row_bytes_(of_->matrix.size(1) * static_cast<int64_t>(of_->matrix.element_size())),
        number_(of_->portions->new_layer()) {}

  // As the convolution keeps them.
  Tensor weights(const Tensor& hidden) const {
    const Tensor made = multiply(of_->product, hidden, of_->matrix);
    const bool rounds = program()->rounds_weights(scalar_of(made.scalar_type()));
    return rounds && made.scalar_type() == at::kFloat ? made.to(at::kBFloat16) : made;
  }

  // The sum over ranges.
  Tensor convolve(const Tensor& x, const Tensor& y, const Tensor& hidden) const {
    const std::vector<PairRange>& parts = portions().ranges(row_bytes_);
    if (parts.size() == 1) return convolve(parts[0], x, y, made(parts[0], hidden));
    const std::vector<Tensor> ys = in_ranges(y, parts);
    Tensor z;
    for (std::size_t n = 0; n < parts.size(); ++n) {
      const Tensor own = convolve(parts[n], x, ys[n], made(parts[n], hidden));
      z = z.defined() ? z.add_(own) : own;
    }
    return z;
  }

  // Of x, to which ranges add, and of y and hidden, of which ranges have rows of their own.
  std::tuple<Tensor, Tensor, Tensor> gradients(const Tensor& gz, const Tensor& x, const Tensor& y,
                                               const Tensor& hidden) const {
    const std::vector<PairRange>& parts = portions().ranges(row_bytes_);
    if (parts.size() == 1) return gradients(parts[0], gz, x, y, taken(parts[0], hidden));
    const Tensor gx = at::zeros_like(x), gy = at::empty_like(y), of_hidden = at::empty_like(hidden);
    const std::vector<Tensor> ys = in_ranges(y, parts);
    for (std::size_t n = parts.size(); n-- > 0;) {  // the weights of the last range are those that are there still
      const auto [add_x, of_y, of_rows] = gradients(parts[n], gz, x, ys[n], taken(parts[n], hidden));
      gx.add_(add_x);
      gy.index_copy_(0, parts[n].slots, of_y);
      parts[n].of_pairs(of_hidden).copy_(of_rows);
    }
    return {gx, gy, of_hidden};
  }

 private:
  Portions& portions() const { return *of_->portions; }
  std::shared_ptr<Program> program() const { return program_of("eqaccel::shared_convolution", of_->payload, of_->key); }

  Tensor made(const PairRange& range, const Tensor& hidden) const {
    const Tensor rows = range.of_pairs(hidden);
    return portions().made({number_, range.first}, rows.size(0) * row_bytes_, [&] { return weights(rows); });
  }
  Tensor taken(const PairRange& range, const Tensor& hidden) const {
    const Tensor rows = range.of_pairs(hidden);
    return portions().taken({number_, range.first}, rows.size(0) * row_bytes_, [&] { return weights(rows); });
  }

  Tensor convolve(const PairRange& range, const Tensor& x, const Tensor& y, const Tensor& weights) const {
    using Signature = Tensor(const Tensor&, int64_t, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                             const Tensor&, int64_t, int64_t, bool, bool);
    static const auto op = find_operator<Signature>("eqaccel::tensor_product_shared");
    return op.call(of_->payload, of_->key, x, y, weights, range.pairs.row, range.index, x.size(0), of_->z_dim,
                   of_->mul_ir, of_->deterministic);
  }

  std::tuple<Tensor, Tensor, Tensor> gradients(const PairRange& range, const Tensor& gz, const Tensor& x,
                                               const Tensor& y, const Tensor& weights) const {
    const int64_t slots = portions().edges_at_a_time(row_bytes_, y.size(0), weights.size(0));
    return ops::gradients(*of_, range, slots, gz, x, y, weights);
  }

  // Where the edges of ranges are among all, one range after another.
  static Tensor order_of(const std::vector<PairRange>& parts) {
    std::vector<Tensor> slots;
    for (const PairRange& part : parts) slots.push_back(part.slots);
    return at::cat(slots);
  }

  // The rows of each range. Written to where they go: torch reads rows of few columns, a block for each, much slower than
  // it writes them.
  static std::vector<Tensor> in_ranges(const Tensor& y, const std::vector<PairRange>& parts) {
    const Tensor order = order_of(parts);
    const Tensor place = at::empty_like(order).scatter_(0, order, at::arange(order.size(0), order.options()));
    std::vector<int64_t> sizes;
    for (const PairRange& part : parts) sizes.push_back(part.slots.size(0));
    return at::empty_like(y).index_copy_(0, place, y).split_with_sizes(sizes);
  }

  const c10::intrusive_ptr<SharedLayer> of_;
  const int64_t row_bytes_, number_;
};

// Between the two, gradients have a row for each edge, and weights have not.
class SharedConvolution : public torch::autograd::Function<SharedConvolution> {
 public:
  static Tensor forward(AutogradContext* context, const c10::intrusive_ptr<SharedLayer>& of, const Tensor& x,
                        const Tensor& y, const Tensor& hidden) {
    const auto layer = c10::make_intrusive<Layer>(of);
    context->saved_data["layer"] = c10::IValue::make_capsule(layer);
    context->save_for_backward({x, y, hidden});
    return layer->convolve(x, y, hidden);
  }

  static variable_list backward(AutogradContext* context, const variable_list& given) {
    TORCH_CHECK(!at::GradMode::is_enabled(),
                "eqaccel::shared_convolution: weights of pairs are differentiated once, not twice.");
    const auto layer = c10::static_intrusive_pointer_cast<Layer>(context->saved_data["layer"].toCapsule());
    const variable_list v = context->get_saved_variables();
    const auto [gx, gy, of_hidden] = layer->gradients(given[0].contiguous(), v[0], v[1], v[2]);
    return {Tensor(), gx, gy, of_hidden};
  }
};

Tensor shared_convolution(const Tensor& payload, int64_t key, const Tensor& product_payload, int64_t product_key,
                          const Tensor& x, const Tensor& y, const Tensor& hidden, const Tensor& matrix,
                          const c10::intrusive_ptr<Portions>& portions, int64_t z_dim, bool mul_ir,
                          bool deterministic) {
  return convolve(c10::make_intrusive<SharedLayer>(payload, key, Product{product_payload, product_key}, matrix.detach(),
                                                   portions, z_dim, mul_ir, deterministic),
                  x, y, hidden);
}

TORCH_LIBRARY_IMPL(eqaccel, CompositeImplicitAutograd, library) {
  register_portions();
  library.impl("shared_convolution", shared_convolution);
}

}  // namespace

Tensor convolve(const c10::intrusive_ptr<SharedLayer>& layer, const Tensor& x, const Tensor& y, const Tensor& hidden) {
  return SharedConvolution::apply(layer, x, y, hidden);
}

}  // namespace eqaccel::ops

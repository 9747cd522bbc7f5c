#include "moments.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "eqaccel/model.h"
#include "product_record.h"

namespace eqaccel {
namespace {

using at::Tensor;
using torch::autograd::grad;
using torch::autograd::variable_list;

constexpr const char* node_energies = "node_energies";

Tensor or_zeros(const Tensor& gradient, const Tensor& like) {
  return gradient.defined() ? gradient : at::zeros_like(like);
}

// The convolutions whose senders depend on where atoms are: not those of a first layer.
std::vector<ops::RecordedProduct> moving(const std::vector<ops::RecordedProduct>& products) {
  std::vector<ops::RecordedProduct> found;
  for (const ops::RecordedProduct& product : products)
    if (product.x.requires_grad()) found.push_back(product);
  return found;
}

// What a convolution gives its senders if the attributes of every edge are multiplied by a factor, (num_edges, 1).
Tensor handed_on(const ops::RecordedProduct& product, const Tensor& gz, const Tensor& factor) {
  const at::NoGradGuard no_grad;
  const Tensor y = product.y.detach() * factor.to(product.y.scalar_type());
  return std::get<0>(tensor_product_backward(product.problem, gz, product.x.detach(), y, product.w.detach()));
}

}  // namespace

Moments find_moments(const torch::jit::Module& module, const Tensor& vectors, const Tensor& edge_index,
                     const Tensor& types, int64_t num_local, int64_t exchange) {
  const auto method = module.find_method(node_energies);
  if (!method) throw std::runtime_error("the model file has no energies of atoms that a heat flux could be found from");
  const at::AutoGradMode gradients(true);
  const Tensor leaf = vectors.detach().requires_grad_();
  std::vector<ops::RecordedProduct> products;
  Tensor energies;
  {
    const ops::ProductRecord record;
    energies = (*method)({leaf, edge_index, types, num_local, exchange}).toTensor();
    products = moving(record.products());
  }

  variable_list messages, senders;
  for (const ops::RecordedProduct& product : products) {
    messages.push_back(product.z);
    senders.push_back(product.x);
  }
  variable_list wanted{leaf};
  wanted.insert(wanted.end(), messages.begin(), messages.end());
  const variable_list found = grad({energies}, wanted, {at::ones_like(energies)}, /*retain_graph=*/true,
                                   /*create_graph=*/false, /*allow_unused=*/true);

  const Tensor moments = at::zeros({vectors.size(0), 3, 3}, vectors.options());
  for (int64_t k = 0; k < 3 && !products.empty(); ++k) {
    variable_list sources;
    for (size_t layer = 0; layer < products.size(); ++layer)
      sources.push_back(
          handed_on(products[layer], or_zeros(found[layer + 1], messages[layer]), vectors.narrow(1, k, 1)));
    const variable_list pass = grad(senders, {leaf}, sources, /*retain_graph=*/true, /*create_graph=*/false,
                                    /*allow_unused=*/true);
    moments.select(1, k).copy_(or_zeros(pass[0], vectors));
  }
  const Tensor constants = module.attr("constants").toTensor().index_select(0, types.narrow(0, 0, num_local));
  return {constants + energies.detach(), or_zeros(found[0], vectors), moments};
}

void check_moments(const torch::jit::Module& module, double cutoff, int64_t num_types, at::ScalarType dtype,
                   c10::Device device) {
  // Atoms reach the next two on either side, so those at the ends hear of each other in the third layer.
  constexpr int64_t atoms = 6;
  const double step = 0.4 * cutoff;
  std::vector<int64_t> senders, receivers, types;
  const Tensor positions = at::empty({atoms, 3}, at::kDouble);
  auto place = positions.accessor<double, 2>();
  for (int64_t i = 0; i < atoms; ++i) {
    place[i][0] = step * (static_cast<double>(i) - 0.5 * (atoms - 1));
    place[i][1] = 0.15 * step * std::cos(2.0 * static_cast<double>(i));
    place[i][2] = 0.15 * step * std::sin(3.0 * static_cast<double>(i));
    types.push_back(i % num_types);
    for (int64_t j = 0; j < atoms; ++j) {
      if (i == j || std::abs(i - j) > 2) continue;
      receivers.push_back(i);
      senders.push_back(j);
    }
  }
  const Tensor sender = at::tensor(senders), receiver = at::tensor(receivers), type = at::tensor(types).to(device);
  const Tensor at_receiver = positions.index_select(0, receiver);
  const Tensor vectors = (at_receiver - positions.index_select(0, sender)).to(device, dtype);
  const Tensor edge_index = at::stack({sender, receiver}).to(device);
  const Moments found = find_moments(module, vectors, edge_index, type, atoms, /*exchange=*/0);

  const at::AutoGradMode gradients(true);
  const Tensor leaf = vectors.detach().requires_grad_();
  const Tensor energies = module.get_method(node_energies)({leaf, edge_index, type, atoms, 0}).toTensor();
  const Tensor weights = positions.to(device, energies.scalar_type());
  const Tensor origin = at_receiver.to(device, dtype);
  double error = 0, scale = 0;
  for (int64_t k = 0; k < 3; ++k) {
    const Tensor moment = or_zeros(grad({energies}, {leaf}, {weights.select(1, k)}, true, false, true)[0], leaf);
    const Tensor shifted = origin.narrow(1, k, 1) * found.gradient;
    const Tensor difference = moment - shifted - found.moments.select(1, k);
    error = std::max(error, difference.abs().max().item<double>());
    scale += moment.abs().sum().item<double>() + shifted.abs().sum().item<double>();
  }
  // As for two evaluations of a network in patches/rounding.py.
  const double eps =
      dtype == at::kDouble ? std::numeric_limits<double>::epsilon() : std::numeric_limits<float>::epsilon();
  if (!(error <= 1024 * eps * scale))  // written so that NaN fails
    throw std::runtime_error(
        "the model has no heat flux here, because its atoms learn of each other in other ways than "
        "by convolutions of eqaccel");
}

}  // namespace eqaccel

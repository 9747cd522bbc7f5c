#include "candidate_tensors.h"

#include <ATen/ATen.h>

#include <array>
#include <cstdlib>
#include <stdexcept>
#include <utility>

namespace eqaccel {
namespace {

using at::Tensor;

Tensor sent(const int32_t* values, at::IntArrayRef shape, c10::Device device) {
  const auto options = at::TensorOptions().dtype(at::kInt);
  return at::from_blob(const_cast<int32_t*>(values), shape, options).to(device).to(at::kLong);
}

int64_t largest_shift(const Candidates& given) {
  int64_t largest = 0;
  for (int64_t k = 0; k < 3 * given.num_images; ++k) largest = std::max<int64_t>(largest, std::abs(given.shifts[k]));
  return largest;
}

Tensor starts(const Tensor& sorted, int64_t atoms) {
  return at::searchsorted(sorted.contiguous(), at::arange(atoms + 1, sorted.options()), /*out_int32=*/true);
}

}  // namespace

CandidateTensors CandidateTensors::room(int64_t atoms, int64_t pairs, c10::Device device) {
  const auto integers = at::TensorOptions().dtype(at::kInt).device(device);
  const auto make = [&](at::IntArrayRef shape) { return at::zeros(shape, integers); };
  return {make({atoms + 1}), make({pairs}), make({pairs, 3}), make({atoms + 1}), make({pairs})};
}

void CandidateTensors::fill(const CandidateTensors& from) {
  for (const auto part : {&CandidateTensors::ptr, &CandidateTensors::sender, &CandidateTensors::shift,
                          &CandidateTensors::t_ptr, &CandidateTensors::t_order}) {
    const Tensor& source = from.*part;
    (this->*part).narrow(0, 0, source.size(0)).copy_(source);
  }
}

// One number says all of a pair, and numbers in order are pairs in order.
CandidateTensors sort_candidates(const Candidates& given, c10::Device device) {
  const int64_t atoms = given.num_atoms, largest = largest_shift(given), width = 2 * largest + 1;
  const int64_t cells = width * width * width;
  if (2 * given.num_pairs >= (int64_t{1} << 31) / 3 || largest > 1000 || atoms > (int64_t{1} << 31) ||
      static_cast<double>(atoms) * static_cast<double>(atoms) * static_cast<double>(cells) > 4e18)
    throw std::runtime_error("there are too many pairs of atoms, or the cell is too small, for lists on the device");
  const Tensor owners = sent(given.owners, {given.num_images}, device);
  const Tensor shifts = sent(given.shifts, {given.num_images, 3}, device);
  const Tensor receiver = sent(given.receivers, {given.num_pairs}, device);
  const Tensor image = sent(given.senders, {given.num_pairs}, device);
  const Tensor sender = owners.index_select(0, image), shift = shifts.index_select(0, image);

  const auto key = [&](const Tensor& to, const Tensor& from, const Tensor& by) {
    Tensor result = to * atoms + from;
    for (int64_t axis = 0; axis < 3; ++axis) result = result * width + (by.select(1, axis) + largest);
    return result;
  };
  const Tensor turned = key(sender, receiver, shift.neg());
  const bool has_ghosts = given.num_local < atoms;
  const Tensor both =
      at::cat({key(receiver, sender, shift), has_ghosts ? turned.masked_select(sender.lt(given.num_local)) : turned});
  const Tensor keys = std::get<0>(at::unique_consecutive(std::get<0>(both.sort())));
  const auto divided = [](const Tensor& by_this, int64_t divisor) {
    const Tensor quotient = at::floor_divide(by_this, divisor);
    return std::pair(quotient, by_this - quotient * divisor);
  };
  std::array<Tensor, 3> axes;
  Tensor rest = keys;
  for (int axis = 2; axis >= 0; --axis) std::tie(rest, axes[axis]) = divided(rest, width);
  const auto [to, from] = divided(rest, atoms);
  const Tensor order = std::get<1>(from.sort(/*stable=*/std::optional<bool>(true), 0, false));
  return {starts(to, atoms), from.to(at::kInt), (at::stack({axes[0], axes[1], axes[2]}, 1) - largest).to(at::kInt),
          starts(from.index_select(0, order), atoms), order.to(at::kInt)};
}

}  // namespace eqaccel

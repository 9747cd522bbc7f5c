// eqaccel::polynomial_polar_form: what derivatives of polynomials beyond the second consist of (see polynomial.h). Made
// of torch's operators, from the terms in the payload, and closed under differentiation: each derivative of a form that
// is linear in every operand is the same form with another operand missing.
#include <torch/library.h>

#include <sstream>

#include "differentiate.h"
#include "polynomial.h"

namespace eqaccel::ops {

constexpr const char* polar_form_name = "eqaccel::polynomial_polar_form";
constexpr int slots = 5, first_feature = 2;  // gz, w and three features

Tensor polynomial_polar_form(const PolynomialProblem& p, const std::array<Tensor, 4>& factors, int64_t missing,
                             c10::SymInt columns) {
  using Signature =
      Tensor(const Tensor&, int64_t, const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t, c10::SymInt);
  static const auto op = find_operator<Signature>(polar_form_name);
  const auto& [f, g, h, i] = factors;
  return op.call(p.payload, p.key, f, g, h, i, missing, std::move(columns));
}

namespace {
namespace polynomial_polar_form_file {

// The terms as lists: the column of each operand that a term reads, and the coefficient.
struct Terms {
  std::array<Tensor, slots> column;  // (terms,) int64
  Tensor coefficient;  // (terms,)
};

Terms read_terms(const Program& program, const at::TensorOptions& options) {
  std::array<std::vector<int64_t>, slots> columns;
  std::vector<double> coefficients;
  std::istringstream lines(program.entry("terms"));
  lines.imbue(std::locale::classic());
  std::array<int64_t, slots> at;
  while (lines >> at[0] >> at[1] >> at[2] >> at[3] >> at[4] >> coefficients.emplace_back())
    for (int slot = 0; slot < slots; ++slot) columns[slot].push_back(at[slot]);
  coefficients.resize(columns[0].size());
  Terms terms;
  for (int slot = 0; slot < slots; ++slot)
    terms.column[slot] = at::tensor(columns[slot], at::kLong).to(options.device());
  terms.coefficient = at::tensor(coefficients, at::kDouble).to(options);
  return terms;
}

void check(const Program& program, const std::array<Tensor, slots>& factors, int64_t missing, int64_t columns) {
  const Tensor& like = factors[missing == 0 ? 1 : 0];
  const int64_t features = program.number("x_dim") + 1;
  const std::array<int64_t, slots> wanted{program.number("z_dim"), program.number("w_dim"), features, features,
                                          features};
  TORCH_CHECK(columns == wanted[missing], polar_form_name, ": argument 'columns' must be ", wanted[missing], ", got ",
              columns, ". Pass the number of columns of the operand that is missing.");
  for (int slot = 0; slot < slots; ++slot) {
    if (slot == missing) continue;
    const Tensor& t = factors[slot];
    TORCH_CHECK(t.dim() == 2 && like.dim() == 2 && t.size(0) == like.size(0) && t.size(1) == wanted[slot] &&
                    t.options().type_equal(like.options()),
                polar_form_name, ": operand ", slot, " must have ", wanted[slot],
                " columns, and all the same rows, dtype and "
                "device, got ",
                t.sizes(), ". Pass gz, w and features with a column more than x, in this order.");
  }
}

// Operand `missing` aside, the operands in the order of the slots.
std::array<Tensor, slots> place(const std::array<Tensor, 4>& factors, int64_t missing) {
  TORCH_CHECK(0 <= missing && missing < slots, polar_form_name, ": argument 'missing' must be 0 to 4, got ", missing,
              ". Count gz, w and the three features.");
  std::array<Tensor, slots> placed;
  for (int slot = 0, next = 0; slot < slots; ++slot)
    if (slot != missing) placed[slot] = factors[next++];
  return placed;
}

// Picks columns for each term, multiplies, and adds up by a product with a matrix of ones and zeros, so that sums have
// a fixed order.
Tensor contract(const Tensor& payload, int64_t key, const Tensor& f, const Tensor& g, const Tensor& h, const Tensor& i,
                int64_t missing, int64_t columns) {
  const auto program = program_of(polar_form_name, payload, key);
  const std::array<Tensor, slots> factors = place({f, g, h, i}, missing);
  check(*program, factors, missing, columns);
  const Terms terms = read_terms(*program, f.options());
  const auto pick = [&](int operand, int slot) { return factors[operand].index_select(1, terms.column[slot]); };
  const auto spread = [&](const Tensor& products, int slot) {
    return at::mm(products, at::one_hot(terms.column[slot], columns).to(products.options()));
  };
  // The sum over the orders of the features that are there, at the given slots of the terms.
  const auto pairs = [&](int one, int other, int at, int next) {
    return pick(one, at) * pick(other, next) + pick(other, at) * pick(one, next);
  };
  Tensor scale = terms.coefficient / 6;  // orders of three features
  for (int slot = 0; slot < first_feature; ++slot)
    if (slot != missing) scale = scale * pick(slot, slot);
  if (missing < first_feature) {
    const Tensor orders =
        pick(2, 2) * pairs(3, 4, 3, 4) + pick(3, 2) * pairs(2, 4, 3, 4) + pick(4, 2) * pairs(2, 3, 3, 4);
    return spread(scale * orders, static_cast<int>(missing));
  }
  const int one = missing == 2 ? 3 : 2, other = missing == 4 ? 3 : 4;
  return spread(scale * pairs(one, other, 3, 4), 2) + spread(scale * pairs(one, other, 2, 4), 3) +
         spread(scale * pairs(one, other, 2, 3), 4);
}

Tensor shape(const Tensor&, int64_t, const Tensor& f, const Tensor&, const Tensor&, const Tensor&, int64_t,
             c10::SymInt columns) {
  return stand_in({f.sym_size(0), std::move(columns)}, f);
}

struct Form {
  PolynomialProblem problem;
  int64_t missing;
  c10::SymInt columns;
};

struct PolarForm {
  static Tensor compute(const Form& form, const Tensor& f, const Tensor& g, const Tensor& h, const Tensor& i) {
    return polynomial_polar_form(form.problem, {f, g, h, i}, form.missing, form.columns);
  }

  static void save(AutogradContext& context, const Form& form, variable_list operands) {
    operands.push_back(form.problem.payload);
    context.save_for_backward(std::move(operands));
    context.saved_data["key"] = form.problem.key;
    context.saved_data["missing"] = form.missing;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list v = context->get_saved_variables();
    const PolynomialProblem p{v[4], context->saved_data["key"].toInt(), 0};
    const int64_t missing = context->saved_data["missing"].toInt();
    std::array<Tensor, slots> all = place({v[0], v[1], v[2], v[3]}, missing);
    all[missing] = gradients[0];
    variable_list results(4);
    for (int slot = 0, operand = 0; slot < slots; ++slot) {
      if (slot == missing) continue;
      std::array<Tensor, 4> others;
      for (int other = 0, next = 0; other < slots; ++other)
        if (other != slot) others[next++] = all[other];
      if (context->needs_input_grad(operand))
        results[operand] = polynomial_polar_form(p, others, slot, v[operand].sym_size(1));
      ++operand;
    }
    return results;
  }

  static variable_list tangents(const Form& form, const variable_list& v, const variable_list& along) {
    variable_list sum(1);
    for (std::size_t operand = 0; operand < v.size(); ++operand) {
      if (!along[operand].defined()) continue;
      std::array<Tensor, 4> factors{v[0], v[1], v[2], v[3]};
      factors[operand] = along[operand];
      add(sum[0], polynomial_polar_form(form.problem, factors, form.missing, form.columns));
    }
    return sum;
  }
};

Tensor differentiable(const Tensor& payload, int64_t key, const Tensor& f, const Tensor& g, const Tensor& h,
                      const Tensor& i, int64_t missing, c10::SymInt columns) {
  return differentiate<PolarForm>(Form{{payload, key, 0}, missing, std::move(columns)}, f, g, h, i);
}

TORCH_LIBRARY_IMPL(eqaccel, Autograd, library) { library.impl("polynomial_polar_form", differentiable); }
TORCH_LIBRARY_IMPL(eqaccel, CPU, library) { library.impl("polynomial_polar_form", contract); }
TORCH_LIBRARY_IMPL(eqaccel, CUDA, library) { library.impl("polynomial_polar_form", contract); }
TORCH_LIBRARY_IMPL(eqaccel, Meta, library) { library.impl("polynomial_polar_form", shape); }

}  // namespace polynomial_polar_form_file
}  // namespace
}  // namespace eqaccel::ops

// How results of eqaccel::silu and of its derivative are made again, by those who would keep them otherwise.
#pragma once
#include <optional>
#include <vector>

#include "operators.h"

namespace eqaccel::ops {

struct SiluSource {
  Tensor payload;
  int64_t key;
  double factor, scale;  // in the kernels too; derivatives beyond the second need them here

  template <class Self, class Run>
  static void each(Self& p, const Run& run) {  // for KeptProblem
    run("key", p.key);
    run("factor", p.factor);
    run("scale", p.scale);
  }
};

// What gave a tensor: x, or gz and x where the tensor is a gradient.
struct SiluRecipe {
  SiluSource source;
  std::vector<Tensor> operands;

  // The values of the tensor, once more; takes one kernel.
  Tensor make() const;
};

// The recipe of a tensor that autograd knows as such a result, and whose operands it still has.
std::optional<SiluRecipe> silu_recipe(const Tensor&);

}  // namespace eqaccel::ops

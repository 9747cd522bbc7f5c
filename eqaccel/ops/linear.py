"""Linear maps of irreps, row by row, with weights that attributes of a row may mix: products with one-hot species."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from eqaccel.families.linear import LINEAR, LinearSpec
from eqaccel.ops.kernel_module import KernelModule
from eqaccel.ops.library import call_operator, load_library

load_library()

_OUTPUT = 3
"""Number of the operand that is missing in a plain call, in `csrc/torch/linear.h`."""


class Linear(KernelModule):
    """Multiplies the channels of each irrep by a matrix, in one kernel for all irreps, and in one for the derivative.

    With attributes, the matrix of a row is a sum of matrices times the attributes of the row. Those that are zero are
    left out, so that a product with one-hot species takes as long as one with a single matrix; but any attributes are
    right. Sums are in a fixed order, so results are bitwise reproducible. Derivatives of any order are calls of the
    same operator, which has a kernel for each but that with respect to attributes: that is products of torch.

    Args:
        spec: The map.
    """

    family = LINEAR

    def __init__(self, spec: LinearSpec) -> None:
        super().__init__(spec)
        self.out_dim = spec.irreps_out.dim

    def forward(
        self,
        x: Tensor,
        w: Tensor,
        y: Optional[Tensor] = None,  # noqa: UP045 (TorchScript)
    ) -> Tensor:
        """Computes z[n, w, c] as the sum over paths of coefficient * y[n, a] * x[n, u, c] * W[u, a, w].

        Args:
            x: (rows, irreps_in.dim) float32 or float64, in (mul, 2l + 1) layout.
            w: (spec.weight_numel,), same dtype and device; see `LinearSpec`.
            y: (rows, spec.num_attributes), likewise; to be left out if there are none.

        Returns:
            (rows, irreps_out.dim), differentiable any number of times in all operands.

        Raises:
            OperandError: If an operand does not fit (in scripted or compiled programs: RuntimeError).
            CompileError: If a kernel does not compile (in scripted or compiled programs, and from derivatives:
                RuntimeError with the same text).
        """
        attributes = x.new_empty([x.size(0), 0]) if y is None else y
        if torch.jit.is_scripting():
            return torch.ops.eqaccel.linear(self.payload, self.key, x, attributes, w, 3, self.out_dim)
        else:
            arguments = (self.payload, self.key, x, attributes, w, _OUTPUT, self.out_dim)
            return call_operator(torch.ops.eqaccel.linear, *arguments)

    def extra_repr(self) -> str:
        """Sizes, for print(module)."""
        s = self.spec
        attributes = f", {s.num_attributes} attributes" if s.num_attributes else ""
        return f"{s.irreps_in} -> {s.irreps_out}, {s.weight_numel} weights{attributes}"

"""Polynomials in the features of each row, as the symmetric contraction of MACE consists of them."""

from __future__ import annotations

import torch
from torch import Tensor

from eqaccel.families.polynomial import POLYNOMIAL, PolynomialSpec
from eqaccel.ops.kernel_module import KernelModule
from eqaccel.ops.library import call_operator, load_library

load_library()


class Polynomial(KernelModule):
    """Evaluates a polynomial for each row, with weights of the row's own, in one kernel a derivative.

    Every row is computed for itself, its terms in a fixed order, so results are bitwise reproducible and nothing is
    kept for the derivatives but the operands. Derivatives beyond the second are composed of torch's operators.

    Args:
        spec: The terms.
    """

    family = POLYNOMIAL

    def __init__(self, spec: PolynomialSpec) -> None:
        super().__init__(spec)
        self.num_outputs = spec.num_outputs

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        """Computes z[r, m] as the sum of coefficient * w[r, k] * x[r, i] * ... over the terms with output m.

        Args:
            x: (rows, spec.num_features) float32 or float64.
            w: (rows, spec.num_weights), same dtype and device.

        Returns:
            (rows, spec.num_outputs), differentiable any number of times in x and w.

        Raises:
            OperandError: If an operand does not fit (in scripted or compiled programs: RuntimeError).
            CompileError: If the kernel, which is compiled when it is first needed, does not compile (in scripted or
                compiled programs, and from derivatives: RuntimeError with the same text).
        """
        if torch.jit.is_scripting():
            return torch.ops.eqaccel.polynomial(self.payload, self.key, x, w, self.num_outputs)
        else:
            return call_operator(torch.ops.eqaccel.polynomial, self.payload, self.key, x, w, self.num_outputs)

    def extra_repr(self) -> str:
        """Sizes, for print(module)."""
        s = self.spec
        return f"{s.num_features} features, {s.num_weights} weights, {s.num_outputs} outputs, {len(s.terms)} terms"

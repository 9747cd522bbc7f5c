"""Radial basis functions of edges with their cutoff, as MACE and NequIP embed lengths."""

from __future__ import annotations

import torch
from torch import Tensor

from eqaccel.families.radial_basis import RADIAL_BASIS, RadialBasisSpec
from eqaccel.ops.kernel_module import KernelModule
from eqaccel.ops.library import call_operator, load_library

load_library()


class RadialBasis(KernelModule):
    """Bessel functions of the length of each edge times a polynomial cutoff, in one kernel a derivative.

    Every edge is computed for itself, so results are bitwise reproducible; the gradient with respect to frequencies is
    a sum of torch's. Values keep their digits near r = 0 and near the cutoff, and are zero from there on, derivatives
    too. Frequencies times lengths may be some ten thousand at most: where there is no cutoff, results are NaN beyond.
    Derivatives beyond the second are composed of torch's operators.

    Args:
        spec: The functions.
    """

    family = RADIAL_BASIS

    def __init__(self, spec: RadialBasisSpec) -> None:
        super().__init__(spec)
        self.factor, self.r_max, self.unit, self.power = spec.factor, spec.r_max, spec.unit, spec.power

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        """Computes z[r, n] = factor * sin(unit * w[n] * x[r]) / x[r] * u(x[r]), with the cutoff u of the spec.

        Args:
            x: (rows, 1), lengths, float32 or float64.
            w: (spec.num_basis,), frequencies over `spec.unit`, same dtype and device.

        Returns:
            (rows, spec.num_outputs), differentiable any number of times in x and w.

        Raises:
            OperandError: If an operand does not fit (in scripted or compiled programs: RuntimeError).
            CompileError: If the kernel, which is compiled when it is first needed, does not compile (in scripted or
                compiled programs, and from derivatives: RuntimeError with the same text).
        """
        if torch.jit.is_scripting():
            return torch.ops.eqaccel.radial_basis(
                self.payload, self.key, x, w, self.factor, self.r_max, self.unit, self.power
            )
        else:
            numbers = (self.factor, self.r_max, self.unit, self.power)
            return call_operator(torch.ops.eqaccel.radial_basis, self.payload, self.key, x, w, *numbers)

    def extra_repr(self) -> str:
        """Sizes, for print(module)."""
        return f"{self.spec.num_basis} functions, cutoff of power {self.power} at {self.r_max:g}"

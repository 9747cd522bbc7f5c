"""SiLU with factors, the activation of radial networks."""

from __future__ import annotations

import torch
from torch import Tensor

from eqaccel.families.silu import SILU, SiluSpec
from eqaccel.ops.kernel_module import KernelModule
from eqaccel.ops.library import call_operator, load_library

load_library()


class ScaledSilu(KernelModule):
    """factor * SiLU(scale * x), in one kernel a derivative; beyond the second derivative in torch's operators.

    Args:
        spec: The factors.
    """

    family = SILU

    def __init__(self, spec: SiluSpec) -> None:
        super().__init__(spec)
        self.factor, self.scale = spec.factor, spec.scale

    def forward(self, x: Tensor) -> Tensor:
        """Computes the activation of each element.

        Args:
            x: Of any shape, float32 or float64.

        Returns:
            The same shape, differentiable any number of times.

        Raises:
            OperandError: If the operand does not fit (in scripted or compiled programs: RuntimeError).
            CompileError: If the kernel, which is compiled when it is first needed, does not compile (in scripted or
                compiled programs, and from derivatives: RuntimeError with the same text).
        """
        if torch.jit.is_scripting():
            return torch.ops.eqaccel.silu(self.payload, self.key, x, self.factor, self.scale)
        else:
            return call_operator(torch.ops.eqaccel.silu, self.payload, self.key, x, self.factor, self.scale)

    def extra_repr(self) -> str:
        """The factors, for print(module)."""
        return f"{self.factor:g} SiLU({self.scale:g} x)"

"""The first layer of a radial network."""

from __future__ import annotations

import torch
from torch import Tensor

from eqaccel.families.radial_layer import RADIAL_LAYER, RadialLayerSpec
from eqaccel.ops.kernel_module import KernelModule
from eqaccel.ops.library import call_operator, load_library

load_library()


class RadialLayer(KernelModule):
    """factor * SiLU(scale * x w) of few columns x, in one kernel, and its gradient with respect to x in another.

    Sums are made anew for the gradient, so that nothing but x is kept. Other derivatives are composed of torch's
    operators; where weights are trained, `MatrixProduct` and `ScaledSilu` serve better.

    Args:
        spec: The layer.
    """

    family = RADIAL_LAYER

    def __init__(self, spec: RadialLayerSpec) -> None:
        super().__init__(spec)
        self.factor, self.scale = spec.factor, spec.scale

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        """Computes the layer.

        Args:
            x: (rows, spec.num_inputs), float32 or float64.
            w: (spec.num_inputs, spec.num_outputs).

        Returns:
            (rows, spec.num_outputs), differentiable any number of times.

        Raises:
            OperandError: If an operand does not fit (in scripted or compiled programs: RuntimeError).
            CompileError: If the kernel, which is compiled when it is first needed, does not compile (in scripted or
                compiled programs, and from derivatives: RuntimeError with the same text).
        """
        if torch.jit.is_scripting():
            return torch.ops.eqaccel.radial_layer(self.payload, self.key, x, w, self.factor, self.scale)
        else:
            return call_operator(torch.ops.eqaccel.radial_layer, self.payload, self.key, x, w, self.factor, self.scale)

    def extra_repr(self) -> str:
        """The layer, for print(module)."""
        return f"{self.factor:g} SiLU({self.scale:g} x w), {self.spec.num_inputs} to {self.spec.num_outputs}"

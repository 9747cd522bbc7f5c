"""Radial networks up to their last layer."""

from __future__ import annotations

import torch
from torch import Tensor

from eqaccel.families.radial_network import RADIAL_NETWORK, RadialNetworkSpec
from eqaccel.ops.kernel_module import KernelModule, has_cuda_kernel
from eqaccel.ops.library import call_operator, load_library

load_library()


class RadialNetwork(KernelModule):
    """Layers of factor * SiLU(scale * x w) one after another, in one kernel, and the gradient by x in another.

    That is for float32 on NVIDIA GPUs of compute capability 8.0 or later: features of layers stay in registers, and are
    made anew for the gradient, so that nothing but x is kept. Each factor is split into two numbers of half precision,
    whose sum has 22 bits, and tensor cores make three products of these parts. Powers of two bring rows of features and
    the weights of a layer into the range of such numbers; what is lost is below 2^-39 of the largest of them. A row of
    results depends on its row of x alone, and is bitwise reproducible. Elsewhere, and for derivatives by weights or of
    higher order, layers are composed of torch's operators.

    Args:
        spec: The layers.
    """

    family = RADIAL_NETWORK

    def __init__(self, spec: RadialNetworkSpec) -> None:
        super().__init__(spec)
        self.widths, self.factors, self.scales = list(spec.widths), list(spec.factors), list(spec.scales)

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        """Computes the layers.

        Args:
            x: (rows, spec.widths[0]), float32 or float64.
            w: (spec.num_weights,), the weights of one layer after the other, each (inputs, outputs) by rows.

        Returns:
            (rows, spec.widths[-1]), differentiable any number of times.

        Raises:
            OperandError: If an operand does not fit (in scripted or compiled programs: RuntimeError).
            CompileError: If the kernel, which is compiled when it is first needed, does not compile (in scripted or
                compiled programs, and from derivatives: RuntimeError with the same text).
        """
        if torch.jit.is_scripting():
            return torch.ops.eqaccel.radial_network(
                self.payload, self.key, x, w, self.widths, self.factors, self.scales
            )
        else:
            numbers = self.widths, self.factors, self.scales
            return call_operator(torch.ops.eqaccel.radial_network, self.payload, self.key, x, w, *numbers)

    def has_kernel(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether a device has the kernels for a dtype.

        Args:
            device: The device.
            dtype: Of the features.
        """
        return has_cuda_kernel(self.family, self.spec, device, dtype)

    def extra_repr(self) -> str:
        """The layers, for print(module)."""
        return f"{' to '.join(map(str, self.widths))}, SiLU"

"""The gate of equivariant networks."""

from __future__ import annotations

import torch
from torch import Tensor

from eqaccel.families.gate import GATE, GateSpec
from eqaccel.ops.kernel_module import KernelModule
from eqaccel.ops.library import call_operator, load_library

load_library()


class Gate(KernelModule):
    """Activations of scalars, and of gates that multiply channels, in one kernel a derivative.

    Derivatives beyond the second are composed of torch's operators.

    Args:
        spec: The gate.
    """

    family = GATE

    def __init__(self, spec: GateSpec) -> None:
        super().__init__(spec)
        self.parts = spec.text()

    def forward(self, x: Tensor) -> Tensor:
        """Computes the gate of each row.

        Args:
            x: (rows, spec.num_inputs), float32 or float64, in e3nn's layout.

        Returns:
            (rows, spec.num_outputs), differentiable any number of times.

        Raises:
            OperandError: If the operand does not fit (in scripted or compiled programs: RuntimeError).
            CompileError: If the kernel, which is compiled when it is first needed, does not compile (in scripted or
                compiled programs, and from derivatives: RuntimeError with the same text).
        """
        if torch.jit.is_scripting():
            return torch.ops.eqaccel.gate(self.payload, self.key, x, self.parts)
        else:
            return call_operator(torch.ops.eqaccel.gate, self.payload, self.key, x, self.parts)

    def extra_repr(self) -> str:
        """Columns, for print(module)."""
        return f"{self.spec.num_inputs} to {self.spec.num_outputs} columns"

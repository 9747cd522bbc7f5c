"""Plain matrix products, as radial networks consist of them, faster than torch's on CPUs and on some GPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from eqaccel import runtime
from eqaccel.families.matrix_product import MATRIX_PRODUCT
from eqaccel.ops.kernel_module import KernelModule
from eqaccel.ops.library import call_operator, load_library

load_library()


class MatrixProduct(KernelModule):
    """Matrix products by the tensor cores of GPUs of compute capability 9.0, with the accuracy of float32, and on CPUs.

    On such a GPU each factor is split into two numbers of TensorFloat-32, whose sum has 22 bits, and three products of
    these parts are added up. Sums are in a fixed order, each row for itself, so results are bitwise reproducible.
    Factors that are not finite give NaN. In float64, on other GPUs, for numbers of terms that are no multiple of four
    or odd numbers of columns, and where torch is allowed TensorFloat-32, it is torch's product.

    On a CPU a sum is added up in the order of its terms, each row for itself, and results take memory that earlier ones
    have given back. It is for many rows, and few enough terms and columns for the second factor to fit a cache.
    """

    family = MATRIX_PRODUCT

    def __init__(self) -> None:
        super().__init__(None)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Computes `a @ b`, differentiable any number of times.

        Args:
            a: (rows, terms).
            b: (terms, columns), same dtype and device.

        Returns:
            (rows, columns)

        Raises:
            OperandError: If an operand does not fit (in scripted or compiled programs: RuntimeError).
            CompileError: If the kernel does not compile (in scripted or compiled programs, and from derivatives:
                RuntimeError with the same text).
        """
        if torch.jit.is_scripting():
            return torch.ops.eqaccel.matrix_product(self.payload, self.key, a, b)
        else:
            return call_operator(torch.ops.eqaccel.matrix_product, self.payload, self.key, a, b)


def adds_rows(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there is a kernel that adds rows while it multiplies: on CPUs, and for compute capability 9.0."""
    if device.type == "cpu":
        return True
    return has_matrix_kernel(device, dtype) and torch.cuda.get_device_capability(device) == (9, 0)


def has_matrix_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `MatrixProduct` has a kernel of its own for a device and a dtype."""
    if device.type != "cuda" or torch.version.hip or dtype != torch.float32 or torch.backends.cuda.matmul.allow_tf32:
        return False
    content, key = MATRIX_PRODUCT.payload(None)
    major, minor = torch.cuda.get_device_capability(device)
    program = runtime.register_program(key, content)
    return program.compile_arch("cuda", "float32", "forward", f"sm_{major}{minor}") is not None

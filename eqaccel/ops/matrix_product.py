"""Plain matrix products, as radial networks consist of them, faster than torch's on CPUs and on some GPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from eqaccel.families.matrix_product import MATRIX_PRODUCT, Factors, MatrixProductSpec
from eqaccel.ops.kernel_module import KernelModule, has_cuda_kernel
from eqaccel.ops.library import call_operator, load_library

load_library()


class MatrixProduct(KernelModule):
    """Matrix products by the tensor cores of GPUs, with the accuracy of float32, and on CPUs.

    On GPUs of compute capability 8.0 and 9.0 each factor is split into two numbers of half precision, whose sum has 22
    bits, and three products of these parts are added up. Powers of two bring rows of `a` and columns of `b` into the
    range of such numbers; what is lost of a factor is below 2^-39 of the largest one in its column of `b`, or in its
    row of `a` among 32 terms. A row of `a` whose absolute values add up to more than 2^112 may overflow, whatever `b`
    is. Sums are in a fixed order, each row for itself, so results are bitwise reproducible. Factors that are not finite
    make their row or column so. In float64, on other GPUs, whose tensor cores are not known to make three products
    faster than torch makes one, for numbers of terms that are no multiple of four or odd numbers of columns, and where
    torch is allowed TensorFloat-32, it is torch's product.

    If factors are rounded instead, each to within 2^-11 of itself, there is one product, on GPUs of compute capability
    8.6, 8.9 and 12.0 too, and whatever torch is allowed. A sum then differs from the exact one by up to 2^-10 times the
    sum of the absolute values of its terms, besides what adding up in float32 makes. The gradient of `b` is torch's
    product as before.

    On a CPU a sum is added up in the order of its terms, each row for itself, and results take memory that earlier ones
    have given back. It is for many rows, and few enough terms and columns for the second factor to fit a cache.

    Args:
        spec: What becomes of factors on a GPU; by default they are split.
    """

    family = MATRIX_PRODUCT

    def __init__(self, spec: MatrixProductSpec | None = None) -> None:
        super().__init__(MatrixProductSpec() if spec is None else spec)

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

    def extra_repr(self) -> str:
        """What becomes of factors, for print(module)."""
        return f"factors {self.spec.factors}"


def has_matrix_kernel(device: torch.device, dtype: torch.dtype, spec: MatrixProductSpec | None = None) -> bool:
    """Whether `MatrixProduct` has a kernel of its own for a GPU and a dtype, and torch does not multiply in its place.

    Args:
        device: The device.
        dtype: Of the factors.
        spec: That of the product; by default the default one.
    """
    spec = MatrixProductSpec() if spec is None else spec
    if device.type == "cuda" and spec.factors is Factors.SPLIT and torch.backends.cuda.matmul.allow_tf32:
        return False
    return has_cuda_kernel(MATRIX_PRODUCT, spec, device, dtype)

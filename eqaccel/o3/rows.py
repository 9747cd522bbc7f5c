"""Leading dimensions as e3nn takes them: operands are broadcast against each other, and kernels get rows."""

from __future__ import annotations

from typing import List, Optional  # noqa: UP035 (TorchScript)

import torch
from torch import Tensor, nn

from eqaccel import ops
from eqaccel.families.linear import LinearPath, LinearSpec
from eqaccel.families.tensor_product import ConnectionMode, TensorProductSpec


def common_shape(x: Tensor, y: Tensor, w: Optional[Tensor]) -> List[int]:  # noqa: UP006, UP045 (TorchScript)
    """The shape that all dimensions but the last are broadcast to; `w` is None if it has none but that."""
    if w is None:
        if x.dim() == 2 and y.dim() == 2 and x.size(0) == y.size(0):
            return [x.size(0)]
        return list(torch.broadcast_tensors(x[..., :1], y[..., :1])[0].size()[:-1])
    if x.dim() == 2 and y.dim() == 2 and w.dim() == 2 and x.size(0) == y.size(0) and x.size(0) == w.size(0):
        return [x.size(0)]
    return list(torch.broadcast_tensors(x[..., :1], y[..., :1], w[..., :1])[0].size()[:-1])


def as_rows(operand: Tensor, shape: List[int]) -> Tensor:  # noqa: UP006 (TorchScript)
    """(rows, columns) of an operand (..., columns) that is broadcast to a shape."""
    if operand.dim() == 2 and len(shape) == 1 and operand.size(0) == shape[0]:
        return operand
    rows = 1
    for size in shape:
        rows *= size
    return operand.expand(shape + [operand.size(-1)]).reshape(rows, operand.size(-1))  # noqa: RUF005 (TorchScript)


class ProductRows(nn.Module):
    """What `TensorProduct` computes, without weights of its own.

    Args:
        spec: The product.

    Attributes:
        is_linear: Whether it is a linear map of x whose weights scalars mix, such as one-hot species.
    """

    def __init__(self, spec: TensorProductSpec) -> None:
        super().__init__()
        self.has_rows_of_weights = spec.weight_numel > 0 and not spec.shared_weights
        linear = _as_linear(spec)
        self.is_linear = linear is not None
        self.kernel = ops.TensorProduct(spec) if linear is None else ops.Linear(linear)

    def forward(self, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        """Multiplies (..., irreps_in1.dim) and (..., irreps_in2.dim) with weights as `TensorProduct` takes them."""
        shape = common_shape(x, y, w if self.has_rows_of_weights else None)
        weights = as_rows(w, shape) if self.has_rows_of_weights else w
        if self.is_linear:
            z = self.kernel(as_rows(x, shape), weights, as_rows(y, shape))
        else:
            z = self.kernel(as_rows(x, shape), as_rows(y, shape), weights)
        return z.view(shape + [z.size(-1)])  # noqa: RUF005 (TorchScript)


def _as_linear(spec: TensorProductSpec) -> LinearSpec | None:
    """The product as a linear map with attributes, if y is one block of scalars and rows share their weights."""
    is_mixed = spec.shared_weights and all(
        path.mode is ConnectionMode.UVW and path.weight_offset is not None for path in spec.paths
    )
    if not is_mixed or not spec.weight_numel or len(spec.irreps_in2) != 1 or spec.irreps_in2[0].ir.l != 0:
        return None
    # A scalar couples each component with itself.
    paths = tuple(LinearPath(path.in1, path.out, float(path.cg()[0, 0, 0])) for path in spec.paths)
    return LinearSpec(spec.irreps_in1, spec.irreps_out, paths, spec.irreps_in2.dim)

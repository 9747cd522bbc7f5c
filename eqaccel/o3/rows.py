"""Leading dimensions as e3nn takes them: operands are broadcast against each other, and kernels get rows."""

from __future__ import annotations

from typing import List, Optional  # noqa: UP035 (TorchScript)

import torch
from torch import Tensor, nn

from eqaccel import ops
from eqaccel.families.tensor_product import TensorProductSpec


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
    """

    def __init__(self, spec: TensorProductSpec) -> None:
        super().__init__()
        self.has_rows_of_weights = spec.weight_numel > 0 and not spec.shared_weights
        self.kernel = ops.TensorProduct(spec)

    def forward(self, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        """Multiplies (..., irreps_in1.dim) and (..., irreps_in2.dim) with weights as `TensorProduct` takes them."""
        shape = common_shape(x, y, w if self.has_rows_of_weights else None)
        weights = as_rows(w, shape) if self.has_rows_of_weights else w
        z = self.kernel(as_rows(x, shape), as_rows(y, shape), weights)
        return z.view(shape + [z.size(-1)])  # noqa: RUF005 (TorchScript)

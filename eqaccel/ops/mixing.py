"""Dense matrices of weights that all rows share, applied before or after a product of channels."""

import sys
from typing import List, Tuple  # noqa: UP035 (TorchScript)

import torch
from torch import Tensor, nn

from eqaccel.errors import OperandError
from eqaccel.families.linear import LinearPath, LinearSpec
from eqaccel.families.tensor_product import TensorProductSpec, UnmixedProduct
from eqaccel.ops.library import is_traced
from eqaccel.ops.linear import Linear

# Rows times weights. Where a batch is differentiated, a host launches the pieces about as long as a GPU takes for one
# kernel and gradients row by row.
_FEW = 2**24
# Where it is not, the pieces' matrix products are faster for more of them only, and with many weights (an H200).
_MANY, _MANY_WEIGHTS = 2**30, 2**14


class DenseMixing(nn.Module):
    """What gives an unmixed product its operands, and turns its rows into those of the whole.

    Matrices that mix pairs of channels are one linear map of irreps. Its layout is (mul, 2l+1), so that of the unmixed
    product is, too.

    Args:
        spec: The whole product.
        product: What is left of it without its dense matrices.
        mul_ir: Whether the layout of the whole is (mul, 2l+1); if not, rows are moved to and from it.

    Attributes:
        few_rows: The most for which one kernel of a GPU computes the whole of a batch, and gradients of weights row by
            row.
        many_rows: The most for which it does where nothing is differentiated.
    """

    scalars: List[Tuple[bool, int, int, List[Tuple[int, int]]]]  # noqa: UP006 (TorchScript: lists that may be empty)
    inputs: List[Tuple[int, int]]  # noqa: UP006
    own: List[int]  # noqa: UP006
    mixed: List[int]  # noqa: UP006

    def __init__(self, spec: TensorProductSpec, product: UnmixedProduct, *, mul_ir: bool) -> None:
        super().__init__()
        self.x_dim, self.y_dim, self.weight_numel = spec.x_dim, spec.y_dim, spec.weight_numel
        numel = spec.weight_numel
        self.few_rows = _FEW // numel
        self.many_rows = _MANY // numel if numel > _MANY_WEIGHTS else sys.maxsize
        self.moves = not mul_ir
        # Rows are split rather than sliced: the gradient of a slice is a whole row, of a split a part.
        self.weights: List[int] = list(product.weights)  # noqa: UP006
        self.own = list(product.own_weights)
        self.scalars = [(group.of_x, group.offset, group.mul, list(group.paths)) for group in product.scalars]
        self.ones_of_x, self.ones_of_y = product.ones
        self.inputs = [(block.ir.dim, block.mul) for block in spec.irreps_in1]
        self.outputs = [(block.mul, block.ir.dim) for block in spec.irreps_out]
        self.reaches_output = product.reaches_output
        self.mixed = [m.weights for m in product.matrices]
        self.mixes_all = self.mixed == list(range(len(self.weights)))
        self.linear: Linear | None = None
        if product.matrices:
            paths = tuple(LinearPath(m.block, m.out, 1.0) for m in product.matrices)
            self.linear = Linear(LinearSpec(product.spec.irreps_out, spec.irreps_out, paths))

    def takes(self, x: Tensor, y: Tensor, w: Tensor) -> bool:
        """Whether operands fit, and all rows share their weights; if not, one kernel computes the whole, or says so."""
        return w.dim() == 1 and x.dim() == 2 and y.dim() == 2 and x.size(1) == self.x_dim and y.size(1) == self.y_dim

    def pays(self, x: Tensor, y: Tensor, w: Tensor) -> bool:
        """Whether pieces are faster for a batch than one kernel; in a program that is traced they are for any number.

        Args:
            x: Of the batch, on a GPU, as y and w.
            y: Likewise.
            w: Likewise.
        """
        is_plain = not (torch.is_grad_enabled() and (x.requires_grad or y.requires_grad or w.requires_grad))
        most = self.many_rows if is_plain else self.few_rows
        if torch.jit.is_scripting():
            return x.size(0) > most
        else:
            return is_traced() or x.size(0) > most

    def operands(self, x: Tensor, y: Tensor, w: Tensor) -> Tuple[Tensor, Tensor, Tensor]:  # noqa: UP006
        """Those of the unmixed product, of those of the whole, with weights (weight_numel,).

        Raises:
            OperandError: If there are more weights or fewer (in scripted programs: torch.jit.Error).
        """
        if w.size(0) != self.weight_numel:
            raise OperandError(
                f"w: expected shape (num_edges, {self.weight_numel}) or ({self.weight_numel},), got {list(w.shape)}. "
                "Check weight_numel."
            )
        weights: List[Tensor] = []  # noqa: UP006
        if not self.mixes_all:
            weights = w.split(self.weights)
        own: List[Tensor] = []  # noqa: UP006
        for of_x, offset, mul, paths in self.scalars:
            factors: List[Tensor] = []  # noqa: UP006
            for path, other in paths:
                if of_x:
                    factors.append(weights[path].reshape(mul, -1))
                else:
                    factors.append(weights[path].reshape(other, mul, -1).transpose(0, 1).reshape(mul, -1))
            # Other types than that of the weights are for the kernel to refuse, which names what has one.
            given = (x if of_x else y).narrow(1, offset, mul).to(w.dtype)
            own.append(torch.ops.eqaccel.dense_product(given, joined(factors, 1)))
        for number in self.own:
            own.append(weights[number])
        rows = transposed(x, self.inputs) if self.moves else x
        if self.ones_of_x > 0:
            rows = torch.cat([rows, x.new_ones(x.size(0), self.ones_of_x)], 1)
        attributes = torch.cat([y, y.new_ones(y.size(0), self.ones_of_y)], 1) if self.ones_of_y > 0 else y
        return rows, attributes, joined(own, -1) if len(own) > 0 else w.new_empty([0])

    def forward(self, rows: Tensor, w: Tensor) -> Tensor:
        """Rows of the whole product.

        Args:
            rows: (rows, z_dim of the unmixed product).
            w: (weight_numel,).
        """
        z = rows
        if self.linear is not None:
            matrices = w
            if not self.mixes_all:
                weights = w.split(self.weights)
                matrices = joined([weights[number] for number in self.mixed], 0)
            z = self.linear(rows, matrices)
            if self.reaches_output:
                z = rows.narrow(1, 0, z.size(1)) + z
        return transposed(z, self.outputs) if self.moves else z


def transposed(rows: Tensor, blocks: List[Tuple[int, int]]) -> Tensor:  # noqa: UP006 (TorchScript)
    """Rows of blocks that are (outer, inner), each as (inner, outer)."""
    count = rows.size(0)  # which -1 could not tell from a block without channels
    parts = rows.split([outer * inner for outer, inner in blocks], 1)
    turned: List[Tensor] = []  # noqa: UP006
    for number, (outer, inner) in enumerate(blocks):
        turned.append(parts[number].reshape(count, outer, inner).transpose(1, 2).reshape(count, outer * inner))
    return joined(turned, 1)


def joined(parts: List[Tensor], dim: int) -> Tensor:  # noqa: UP006 (TorchScript)
    """Tensors one after the other; one alone is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

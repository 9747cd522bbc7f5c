"""Dense matrices of weights that all rows share, applied before or after a product of channels."""

import sys
from typing import List, Tuple  # noqa: UP035 (TorchScript)

import torch
from torch import Tensor, nn

from eqaccel.errors import OperandError
from eqaccel.families.tensor_product import TensorProductSpec, UnmixedProduct
from eqaccel.ops.library import is_traced

# Rows times weights. Where a batch is differentiated, a host launches the pieces about as long as a GPU takes for one
# kernel and gradients row by row.
_FEW = 2**24
# Where it is not, the pieces' matrix products are faster for more of them only, and with many weights (an H200).
_MANY, _MANY_WEIGHTS = 2**30, 2**14


class DenseMixing(nn.Module):
    """What gives an unmixed product its operands, and turns its rows into those of the whole.

    Args:
        spec: The whole product.
        product: What is left of it without its dense matrices.
        mul_ir: Whether the layout of the whole is (mul, 2l+1).

    Attributes:
        product_mul_ir: Whether the unmixed product is to have this layout, too. It has not where pairs of channels
            have several components, each of which a matrix multiplies.
        few_rows: The most for which one kernel of a GPU computes the whole of a batch, and gradients of weights row by
            row.
        many_rows: The most for which it does where nothing is differentiated.
    """

    inputs: List[Tuple[int, int]]  # noqa: UP006 (TorchScript, which has to know types of lists that may be empty)
    matrices: List[Tuple[int, int, int, int, int, bool]]  # noqa: UP006
    scalars: List[Tuple[bool, int, int, List[Tuple[int, int]]]]  # noqa: UP006

    def __init__(self, spec: TensorProductSpec, product: UnmixedProduct, *, mul_ir: bool) -> None:
        super().__init__()
        self.x_dim, self.y_dim, self.weight_numel = spec.x_dim, spec.y_dim, spec.weight_numel
        weights = max(spec.weight_numel, 1)
        self.few_rows = _FEW // weights
        self.many_rows = _MANY // weights if weights > _MANY_WEIGHTS else sys.maxsize
        self.product_mul_ir = mul_ir and all(product.spec.irreps_out[m.block].ir.l == 0 for m in product.matrices)
        self.moves = mul_ir and not self.product_mul_ir
        # Rows are split rather than sliced: the gradient of a slice is a whole row, of a split a part.
        self.weights: List[int] = list(product.weights)  # noqa: UP006
        # A flag for each rather than a list of numbers: TorchScript takes no list that may be empty.
        self.is_own = [number in product.own_weights for number in range(len(product.weights))]
        self.scalars = [(group.of_x, group.offset, group.mul, list(group.paths)) for group in product.scalars]
        self.ones_of_x, self.ones_of_y = product.ones
        self.inputs = [(block.mul, block.ir.dim) for block in spec.irreps_in1]
        self.blocks: List[int] = [block.dim for block in product.spec.irreps_out]  # noqa: UP006
        self.outputs: List[Tuple[int, int, bool]] = [  # noqa: UP006
            (block.mul, block.ir.dim, number in product.own) for number, block in enumerate(spec.irreps_out)
        ]
        self.matrices = []
        begun = set(product.own)
        for m in product.matrices:
            self.matrices.append((m.block, m.out, m.weights, m.pairs, m.mul, m.out in begun))
            begun.add(m.out)
        self.reached = [number in begun for number in range(len(spec.irreps_out))]

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
        for number, part in enumerate(weights):
            if self.is_own[number]:
                own.append(part)
        rows = self.features(x)
        if self.ones_of_x > 0:
            rows = torch.cat([rows, x.new_ones(x.size(0), self.ones_of_x)], 1)
        attributes = torch.cat([y, y.new_ones(y.size(0), self.ones_of_y)], 1) if self.ones_of_y > 0 else y
        return rows, attributes, joined(own, -1) if len(own) > 0 else w[:0]

    def features(self, x: Tensor) -> Tensor:
        """Rows of x in the layout of the unmixed product."""
        if not self.moves:
            return x
        blocks = x.split([mul * dim for mul, dim in self.inputs], 1)
        moved: List[Tensor] = []  # noqa: UP006
        for number, (mul, dim) in enumerate(self.inputs):
            moved.append(transposed(blocks[number], mul, dim))
        return joined(moved, 1)

    def forward(self, rows: Tensor, w: Tensor) -> Tensor:
        """Rows of the whole product.

        Args:
            rows: (rows, z_dim of the unmixed product).
            w: (weight_numel,).
        """
        count = rows.size(0)
        given, weights = rows.split(self.blocks, 1), w.split(self.weights)
        sums: List[Tensor] = []  # noqa: UP006
        for number, (mul, dim, is_own) in enumerate(self.outputs):
            if is_own:
                sums.append(given[number])
            else:  # what is reached begins with the first product instead
                sums.append(rows.new_zeros(0 if self.reached[number] else count, mul * dim))
        for block, out, of_path, pairs, mul, has_begun in self.matrices:
            dim = self.outputs[out][1]
            of_pairs, matrix = given[block].reshape(count * dim, pairs), weights[of_path].reshape(pairs, mul)
            mixed = torch.ops.eqaccel.dense_product(of_pairs, matrix).reshape(count, dim * mul)
            sums[out] = sums[out] + mixed if has_begun else mixed
        if self.moves:
            for number, (mul, dim, _) in enumerate(self.outputs):
                sums[number] = transposed(sums[number], dim, mul)
        return joined(sums, 1)


def transposed(block: Tensor, outer: int, inner: int) -> Tensor:
    """Rows of a block in its other layout, (inner, outer)."""
    rows = block.size(0)  # which -1 could not tell from a block without channels
    return block.reshape(rows, outer, inner).transpose(1, 2).reshape(rows, outer * inner)


def joined(parts: List[Tensor], dim: int) -> Tensor:  # noqa: UP006 (TorchScript)
    """Tensors one after the other; one alone is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

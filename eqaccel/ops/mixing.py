"""Dense matrices of weights that all rows share, applied after a product that keeps all pairs of channels."""

from __future__ import annotations

from typing import List, Tuple  # noqa: UP035 (TorchScript)

import torch
from torch import Tensor, nn

from eqaccel.errors import OperandError
from eqaccel.families.tensor_product import TensorProductSpec, UnmixedProduct


class DenseMixing(nn.Module):
    """What turns rows of an unmixed product, which has the layout (2l+1, mul), into those of the whole.

    Args:
        spec: The whole product.
        product: What is left of it without its dense matrices.
        mul_ir: Whether the layout of the whole is (mul, 2l+1).
    """

    def __init__(self, spec: TensorProductSpec, product: UnmixedProduct, *, mul_ir: bool) -> None:
        super().__init__()
        self.mul_ir = mul_ir
        self.weight_numel = spec.weight_numel
        # Rows are split rather than sliced: the gradient of a slice is a whole row, of a split a part.
        self.weights: List[int] = list(product.weights)  # noqa: UP006 (TorchScript)
        # A flag for each rather than a list of numbers: TorchScript takes no list that may be empty.
        self.is_own = [number in product.own_weights for number in range(len(product.weights))]
        self.inputs: List[Tuple[int, int]] = [(block.mul, block.ir.dim) for block in spec.irreps_in1]  # noqa: UP006
        self.blocks: List[int] = [block.dim for block in product.spec.irreps_out]  # noqa: UP006
        self.outputs: List[Tuple[int, int, bool]] = [  # noqa: UP006
            (block.mul, block.ir.dim, number in product.own) for number, block in enumerate(spec.irreps_out)
        ]
        self.matrices: List[Tuple[int, int, int, int, int, bool]] = []  # noqa: UP006
        begun = set(product.own)
        for m in product.matrices:
            self.matrices.append((m.block, m.out, m.weights, m.pairs, m.mul, m.out in begun))
            begun.add(m.out)
        self.reached = [number in begun for number in range(len(spec.irreps_out))]

    def own_weights(self, w: Tensor) -> Tensor:
        """The weights of the unmixed product, of those of the whole, (weight_numel,).

        Raises:
            OperandError: If there are more or fewer (in scripted programs: torch.jit.Error).
        """
        if w.size(0) != self.weight_numel:
            raise OperandError(
                f"w: expected shape (num_edges, {self.weight_numel}) or ({self.weight_numel},), got {list(w.shape)}. "
                "Check weight_numel."
            )
        own: List[Tensor] = []  # noqa: UP006 (TorchScript)
        for number, part in enumerate(w.split(self.weights)):
            if self.is_own[number]:
                own.append(part)
        return torch.cat(own) if len(own) > 0 else w[:0]

    def features(self, x: Tensor) -> Tensor:
        """Rows of x in the layout (2l+1, mul)."""
        if not self.mul_ir:
            return x
        blocks = x.split([mul * dim for mul, dim in self.inputs], 1)
        moved: List[Tensor] = []  # noqa: UP006
        for number, (mul, dim) in enumerate(self.inputs):
            moved.append(blocks[number].reshape(x.size(0), mul, dim).transpose(1, 2).reshape(x.size(0), mul * dim))
        return moved[0] if len(moved) == 1 else torch.cat(moved, 1)

    def forward(self, rows: Tensor, w: Tensor) -> Tensor:
        """Rows of the whole product.

        Args:
            rows: (rows, z_dim of the unmixed product), in the layout (2l+1, mul).
            w: (weight_numel,).
        """
        count = rows.size(0)
        given, weights = rows.split(self.blocks, 1), w.split(self.weights)
        sums: List[Tensor] = []  # noqa: UP006
        for number, (mul, dim, is_own) in enumerate(self.outputs):
            if is_own:
                sums.append(given[number].reshape(count, dim, mul))
            else:  # what is reached begins with the first product instead
                sums.append(rows.new_zeros(0 if self.reached[number] else count, dim, mul))
        for block, out, of_path, pairs, mul, has_begun in self.matrices:
            dim = self.outputs[out][1]
            mixed = given[block].reshape(count * dim, pairs).mm(weights[of_path].reshape(pairs, mul))
            mixed = mixed.reshape(count, dim, mul)
            sums[out] = sums[out] + mixed if has_begun else mixed
        flat: List[Tensor] = []  # noqa: UP006
        for total in sums:
            flat.append((total.transpose(1, 2) if self.mul_ir else total).reshape(count, total.size(1) * total.size(2)))
        return flat[0] if len(flat) == 1 else torch.cat(flat, 1)

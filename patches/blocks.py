"""Matrices of blocks, each the same for all components of an irrep, as products that a GPU does in few launches.

A small matrix is laid out whole, zeros included. A large one is multiplied block by block, each with its zeros between
different components. The matrices are made of their values at every call, by differentiable operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

WHOLE = 2**19
"""Entries up to which a matrix is kept whole: fewer operators, and too few multiplications to matter on a GPU."""


@dataclass(frozen=True)
class Block:
    """The part of a matrix that maps one irrep to another: `values[u, w] * scale`, times the identity of components.

    Attributes:
        row: First row of the block, a column of the input.
        column: First column of the block.
        components: Components of the irrep, 2l + 1.
        values: (mul_in, mul_out) int64, where in the vector of weights the entries are: side by side.
        scale: Factor of all of them.
    """

    row: int
    column: int
    components: int
    values: Tensor
    scale: float

    @property
    def height(self) -> int:
        """Rows of the block."""
        return self.values.shape[0] * self.components

    @property
    def width(self) -> int:
        """Columns of the block."""
        return self.values.shape[1] * self.components


class _Exact(torch.nn.Module):
    """Has a buffer `scale`, which keeps no trace of the types that the module was converted to before."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.exact_scale = scale
        self.register_buffer("scale", scale.to(torch.get_default_dtype()), persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> _Exact:
        super()._apply(fn, recurse)
        self.scale = self.exact_scale.to(self.scale)
        return self


class _SingleBlock(_Exact):
    """Multiplies by one block."""

    def __init__(self, block: Block, copies: int) -> None:
        unit = torch.eye(block.components, dtype=torch.float64) * block.scale
        super().__init__(unit.view(1, block.components, 1, block.components, 1))
        self.start, self.shape = block.values[0, 0].item() * copies, [*block.values.shape, copies]
        self.numel, self.height, self.width = block.values.numel() * copies, block.height, block.width
        self.multiplications = block.height * block.width * copies

    def forward(self, columns: Tensor, values: Tensor) -> Tensor:
        mul_in, mul_out, copies = self.shape
        entries = values.narrow(0, self.start, self.numel).view(mul_in, 1, mul_out, 1, copies) * self.scale
        return (columns @ entries.view(self.height, -1)).view(columns.size(0), self.width, copies)


class _Table(_Exact):
    """Multiplies by a whole matrix, whose entries are looked up."""

    def __init__(self, dim_in: int, dim_out: int, blocks: Sequence[Block], copies: int) -> None:
        index = torch.zeros(dim_in, dim_out, copies, dtype=torch.int32)
        scale = torch.zeros(dim_in, dim_out, copies, dtype=torch.float64)
        for block in blocks:
            for component in range(block.components):
                rows = slice(block.row + component, block.row + block.height, block.components)
                columns = slice(block.column + component, block.column + block.width, block.components)
                index[rows, columns] = (block.values[:, :, None] * copies + torch.arange(copies)).int()
                scale[rows, columns] = block.scale
        super().__init__(scale.flatten())
        self.register_buffer("index", index.flatten(), persistent=False)
        self.width, self.copies, self.multiplications = dim_out, copies, index.numel()

    def forward(self, columns: Tensor, values: Tensor) -> Tensor:
        entries = torch.index_select(values, 0, self.index) * self.scale
        return (columns @ entries.view(columns.size(1), -1)).view(columns.size(0), self.width, self.copies)


class _Zeros(torch.nn.Module):
    """Stands for columns of the matrix that are zero."""

    def __init__(self, width: int, copies: int) -> None:
        super().__init__()
        self.width, self.copies, self.multiplications = width, copies, 0

    def forward(self, columns: Tensor, values: Tensor) -> Tensor:
        return columns.new_zeros([columns.size(0), self.width, self.copies])


class BlockProduct(torch.nn.Module):
    """Multiplies by matrices that consist of blocks, several matrices of the same blocks at a time.

    Args:
        dim_in: Rows of a matrix.
        dim_out: Columns of a matrix.
        blocks: What is not zero; no two overlap.
        copies: Number of matrices.
    """

    def __init__(self, dim_in: int, dim_out: int, blocks: Sequence[Block], copies: int = 1) -> None:
        super().__init__()
        blocks = sorted(blocks, key=lambda block: block.column)
        if dim_in * dim_out * copies <= WHOLE or _touch(blocks):
            self.parts = torch.nn.ModuleList([_Table(dim_in, dim_out, blocks, copies)])
            self.pieces, self.columns = [0], [dim_in]
            return
        parts, pieces, end = [], [], 0
        edges = sorted({0, dim_in, *(edge for block in blocks for edge in (block.row, block.row + block.height))})
        for block in blocks:
            if block.column > end:
                parts.append(_Zeros(block.column - end, copies))
                pieces.append(0)
            end = block.column + block.width
            parts.append(_SingleBlock(block, copies))
            pieces.append(edges.index(block.row))
        if end < dim_out:
            parts.append(_Zeros(dim_out - end, copies))
            pieces.append(0)
        self.parts, self.pieces = torch.nn.ModuleList(parts), pieces
        self.columns = [b - a for a, b in pairwise(edges)]

    @property
    def multiplications(self) -> int:
        """Multiplications for one row of the input."""
        return sum(part.multiplications for part in self.parts)

    __jit_unused_properties__ = ("multiplications",)

    def forward(self, x: Tensor, values: Tensor) -> Tensor:
        """Computes `x @ matrix` for every matrix.

        Args:
            x: (num_rows, dim_in).
            values: (num_values * copies,), the vector that the blocks refer to, of the type of `x`; for each value the
                one in every matrix.

        Returns:
            (num_rows, dim_out, copies)
        """
        inputs = [x] if len(self.columns) == 1 else x.split(self.columns, 1)
        products: list[Tensor] = []
        for number, part in enumerate(self.parts):
            products.append(part(inputs[self.pieces[number]], values))
        return products[0] if len(products) == 1 else torch.cat(products, 1)


def joined(blocks: Sequence[Block]) -> list[Block]:
    """The same matrix in fewer blocks: those one below the other become one, if their values also follow each other."""
    found: list[Block] = []
    for block in blocks:
        above = found[-1] if found else None
        if (
            above is not None
            and (above.column, above.components, above.scale) == (block.column, block.components, block.scale)
            and above.row + above.height == block.row
            and above.values.shape[1] == block.values.shape[1]
            and int(above.values[-1, -1]) + 1 == int(block.values[0, 0])
        ):
            found[-1] = replace(above, values=torch.cat([above.values, block.values]))
        else:
            found.append(block)
    return found


def _touch(blocks: Sequence[Block]) -> bool:
    """Whether some blocks share rows or columns with others; they are in the order of their columns."""
    by_row = sorted(blocks, key=lambda block: block.row)
    return any(a.column + a.width > b.column for a, b in pairwise(blocks)) or any(
        a.row + a.height > b.row for a, b in pairwise(by_row)
    )

"""Rows of irreps in another layout."""

from __future__ import annotations

from torch import Tensor

from eqaccel.irreps import Irreps


def to_ir_mul(rows: Tensor, irreps: Irreps) -> Tensor:
    """Rows (num_rows, irreps.dim) whose blocks are (mul, 2l+1), as rows whose blocks are (2l+1, mul)."""
    return _transposed(rows, [(block.mul, block.ir.dim) for block in irreps])


def to_mul_ir(rows: Tensor, irreps: Irreps) -> Tensor:
    """Rows (num_rows, irreps.dim) whose blocks are (2l+1, mul), as rows whose blocks are (mul, 2l+1)."""
    return _transposed(rows, [(block.ir.dim, block.mul) for block in irreps])


def _transposed(rows: Tensor, shapes: list[tuple[int, int]]) -> Tensor:
    moved, sizes = rows.new_empty(rows.shape), [first * second for first, second in shapes]
    for to, block, (first, second) in zip(moved.split(sizes, 1), rows.split(sizes, 1), shapes, strict=True):
        to.unflatten(1, (second, first)).copy_(block.unflatten(1, (first, second)).transpose(1, 2))
    return moved

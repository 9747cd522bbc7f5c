"""How a linear map is computed: the blocks that are written, the paths that add to each, and what a GPU block takes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from eqaccel.codegen import Direction
from eqaccel.families.linear.spec import LinearSpec

_ROW_LANES, _COLUMN_LANES = 4, 8
"""Threads of a GPU warp that have rows of their own, and for each of these rows, columns of their own."""


@dataclass(frozen=True)
class Tile:
    """What a GPU block takes of an output.

    Attributes:
        components: Components of the output's irrep.
        rows: Rows of a thread, with all their components.
        columns: Columns of a thread.
        row_warps: Warps of a block that have rows of their own.
        column_warps: Warps that share rows and have columns of their own.
        terms: Terms that are multiplied at a time.
    """

    components: int
    rows: int
    columns: int
    row_warps: int
    column_warps: int
    terms: int

    @property
    def block_rows(self) -> int:
        """Rows of a block."""
        return _ROW_LANES * self.rows * self.row_warps

    @property
    def block_columns(self) -> int:
        """Columns of a block."""
        return _COLUMN_LANES * self.columns * self.column_warps


@dataclass(frozen=True)
class Shape:
    """A GPU kernel: with large tiles few bytes move, with small ones there are blocks enough for few rows.

    Attributes:
        sums: Of a thread, at most, where it has more than one row.
        columns: Columns of a thread, at most.
        row_warps: As for a tile.
        column_warps: As for a tile.
        terms: As for a tile, at most.
        resident: Blocks that a multiprocessor is to hold at a time.
    """

    sums: int
    columns: int
    row_warps: int
    column_warps: int
    terms: int
    resident: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return _ROW_LANES * _COLUMN_LANES * self.row_warps * self.column_warps

    def tile(self, components: int, widest: int, longest: int) -> Tile:
        """The tile for outputs of so many components, columns and terms at most."""
        columns = min(self.columns, _power_of_two(-(-widest // _COLUMN_LANES)), _power_below(_MOST_SUMS / components))
        rows = min(_power_below(self.sums / (components * columns)), _MOST_ROWS)
        terms = min(self.terms, max(_power_of_two(longest), _LEAST_TERMS))
        return Tile(components, rows, columns, self.row_warps, self.column_warps, terms)


_MOST_SUMS = 64
"""Of a thread, unless there are as many components: registers that hold one number of 4 bytes."""
_MOST_ROWS = 8
"""Of a thread."""
_LEAST_TERMS = 4
"""Terms that are read as one, in the smaller of the two types of numbers."""

SHAPES = {
    4: (Shape(64, 8, 4, 1, 16, 3), Shape(4, 2, 2, 2, 32, 4)),
    8: (Shape(32, 4, 4, 1, 8, 3), Shape(4, 2, 2, 2, 16, 3)),
}
"""Kernels by the bytes of a number, that with the largest tiles first. Measured on an H200."""


def kernel_name(number: int) -> str:
    """Name of the kernel of a shape."""
    return f"eq_linear_{number}"


def _power_of_two(least: float) -> int:
    """The least power of two that is not less."""
    return 1 << max(math.ceil(least) - 1, 0).bit_length()


def _power_below(most: float) -> int:
    """The largest power of two that is not more, or one."""
    return 1 << max(int(most), 1).bit_length() - 1


@dataclass(frozen=True)
class Factor:
    """A path as a direction sees it: terms that are read, times a matrix of weights, or its transpose.

    Attributes:
        first: First column of the block that is read.
        terms: Multiplicity of that block, the terms of a sum.
        begin: Where the weights of the path begin.
        stride: Distance of the weights of neighbouring terms, or backward of neighbouring columns; of the others: 1.
        matrix_stride: Distance of the matrices of neighbouring attributes.
        coefficient: Factor of all of them.
    """

    first: int
    terms: int
    begin: int
    stride: int
    matrix_stride: int
    coefficient: float


NO_FACTOR = Factor(first=0, terms=0, begin=0, stride=0, matrix_stride=0, coefficient=0.0)
"""Of an output that nothing is added to: a GPU writes zeros as it writes sums."""


@dataclass(frozen=True)
class Output:
    """A block that is written.

    Attributes:
        first: First column of the block.
        mul: Multiplicity of the block.
        components: Components of its irrep.
        factors: What is added up.
    """

    first: int
    mul: int
    components: int
    factors: tuple[Factor, ...]


@dataclass(frozen=True)
class LinearPlan:
    """The map from `in_dim` to `out_dim` columns that a direction is.

    Attributes:
        in_dim: Columns that are read.
        out_dim: Columns that are written.
        attributes: Attributes of a row.
        outputs: The blocks that are written; together they are all columns.
    """

    in_dim: int
    out_dim: int
    attributes: int
    outputs: tuple[Output, ...]

    @property
    def components(self) -> list[int]:
        """Numbers of components that there are."""
        return sorted({output.components for output in self.outputs})

    @property
    def most_staged(self) -> int:
        """Terms of an output, of all its paths."""
        return max(sum(factor.terms for factor in output.factors) for output in self.outputs)

    def tiles(self, shape: Shape) -> list[Tile]:
        """The tiles of a GPU kernel, for each number of components that there is."""
        tiles = []
        for components in self.components:
            outputs = [output for output in self.outputs if output.components == components]
            longest = max((factor.terms for output in outputs for factor in output.factors), default=1)
            tiles.append(shape.tile(components, max(output.mul for output in outputs), longest))
        return tiles


def make_plan(spec: LinearSpec, direction: Direction) -> LinearPlan:
    """The plan of a direction: backward reads what forward writes."""
    forward = direction is Direction.FORWARD
    read, written = (spec.irreps_in, spec.irreps_out) if forward else (spec.irreps_out, spec.irreps_in)
    outputs = []
    for number, (block, place) in enumerate(zip(written, written.slices(), strict=True)):
        factors = []
        for path, (begin, end) in zip(spec.paths, pairwise(spec.weight_offsets), strict=True):
            reads, writes = (path.source, path.target) if forward else (path.target, path.source)
            if writes != number or begin == end:
                continue
            _, matrices, mul_out = spec.weight_shape(path)
            first, terms = read.slices()[reads].start, read[reads].mul
            factors.append(Factor(first, terms, begin, matrices * mul_out, mul_out, path.coefficient))
        if block.mul:
            outputs.append(Output(place.start, block.mul, block.ir.dim, tuple(factors)))
    return LinearPlan(read.dim, written.dim, spec.num_attributes, tuple(outputs))

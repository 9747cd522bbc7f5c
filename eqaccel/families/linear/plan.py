"""How a linear map is computed: the blocks that are written, the paths that add to each, and what a GPU warp takes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from eqaccel.codegen import Direction
from eqaccel.families.linear.spec import LinearSpec

WARPS = 4
"""Of a GPU block; each takes a group of rows, all of the block the same columns."""
WARP = 32
_SUMS = {4: 64, 8: 24}
"""Sums that a thread keeps, by the bytes of a number: with more, some kernel runs out of registers."""
_VECTORS = {4: 4, 8: 2}
"""Columns of a thread, at most."""
_MOST_ROWS = 32


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
        """Terms of an output, of all its paths and attributes."""
        terms = (sum(factor.terms for factor in output.factors) for output in self.outputs)
        return max(terms) * max(self.attributes, 1)

    def vectors(self, scalar_bytes: int) -> int:
        """Columns of a GPU thread."""
        widest = max(output.mul for output in self.outputs)
        return min(-(-widest // WARP), _VECTORS[scalar_bytes])

    def rows(self, scalar_bytes: int) -> int:
        """Rows of components that a GPU warp multiplies at a time, unless one irrep has more."""
        return min(_SUMS[scalar_bytes] // self.vectors(scalar_bytes), _MOST_ROWS)

    def block_rows(self, output: Output, scalar_bytes: int) -> int:
        """Rows of the operand that a GPU block takes."""
        return WARPS * max(self.rows(scalar_bytes) // output.components, 1)

    def column_tiles(self, output: Output, scalar_bytes: int) -> int:
        """Blocks side by side."""
        return -(-output.mul // (WARP * self.vectors(scalar_bytes)))


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

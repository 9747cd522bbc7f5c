"""How the derivative of a linear map by its weights is computed: its matrices, and what they are sums of."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from eqaccel.families.linear.body import write_tables
from eqaccel.families.linear.spec import LinearSpec

THREADS = 256
"""Of a GPU block, which adds up a square of a matrix."""

_BLOCK_SIDE = 16
"""Threads below, and beside each other."""


@dataclass(frozen=True)
class Written:
    """A block of gz that some path writes: its first column, multiplicity and components."""

    first: int
    mul: int
    components: int


@dataclass(frozen=True)
class Matrix:
    """The weights of a path: for each attribute, a sum over rows and components of products of x and gz.

    Attributes:
        first: First column of the block of x.
        mul_in: Its multiplicity.
        block: Number of the block of gz.
        begin: Where the weights begin.
        coefficient: Factor of the sums.
    """

    first: int
    mul_in: int
    block: int
    begin: int
    coefficient: float


@dataclass(frozen=True)
class WeightsPlan:
    """The derivative by weights.

    Attributes:
        in_dim: Columns of x.
        out_dim: Columns of gz.
        attributes: Attributes of a row.
        weights: Number of weights; the matrices are all of them.
        blocks: The blocks of gz that are read.
        matrices: The weights of each path.
    """

    in_dim: int
    out_dim: int
    attributes: int
    weights: int
    blocks: tuple[Written, ...]
    matrices: tuple[Matrix, ...]

    def thread_side(self, matrix: Matrix) -> int:
        """Rows, and columns, of the square of a thread: with more it reads less, unless too much of them is empty."""
        small, large = (self._covered(matrix, _BLOCK_SIDE * side) for side in (2, 4))
        return 4 if large <= 1.5 * small else 2

    def _covered(self, matrix: Matrix, side: int) -> int:
        """What squares of so many rows and columns cover of a matrix, and beside it."""
        return math.prod(-(-mul // side) * side for mul in (matrix.mul_in, self.blocks[matrix.block].mul))

    def side(self, matrix: Matrix) -> int:
        """Rows, and columns, of the square of a GPU block."""
        return _BLOCK_SIDE * self.thread_side(matrix)

    @property
    def squares(self) -> int:
        """Squares of all matrices."""
        count = sum(self._covered(m, self.side(m)) // self.side(m) ** 2 for m in self.matrices)
        return count * max(self.attributes, 1)


def make_weights_plan(spec: LinearSpec) -> WeightsPlan:
    """The plan of the derivative by weights."""
    read, written = spec.irreps_in, spec.irreps_out
    paths = [
        (path, begin)
        for path, (begin, end) in zip(spec.paths, pairwise(spec.weight_offsets), strict=True)
        if begin < end
    ]
    targets = sorted({path.target for path, _ in paths})
    blocks = tuple(Written(written.slices()[n].start, written[n].mul, written[n].ir.dim) for n in targets)
    matrices = tuple(
        Matrix(
            read.slices()[path.source].start,
            read[path.source].mul,
            targets.index(path.target),
            begin,
            float(path.coefficient),
        )
        for path, begin in paths
    )
    return WeightsPlan(read.dim, written.dim, spec.num_attributes, spec.weight_numel, blocks, matrices)


CPU_WEIGHTS_BODY = "EQ_EXPORT_LINEAR_WEIGHTS\n"
"""Of all maps, whose tables come with their operands."""


def write_weights(plan: WeightsPlan) -> str:
    """The tables for the CPU, which `WeightsMap` of cpu_linear_weights.h reads."""
    sizes = [plan.in_dim, plan.out_dim, plan.attributes, len(plan.blocks), len(plan.matrices), plan.weights]
    blocks = [number for b in plan.blocks for number in (b.first, b.mul, b.components)]
    matrices = [number for m in plan.matrices for number in (m.first, m.mul_in, m.block, m.begin)]
    return write_tables([*sizes, *blocks, *matrices], [m.coefficient for m in plan.matrices])


def print_weights(plan: WeightsPlan) -> str:
    """The body of the derivative by weights for GPUs."""
    blocks = [f"{{{b.first}, {b.mul}, {b.components}}}," for b in plan.blocks]
    matrices = [f"{{{m.first}, {m.mul_in}, {m.block}, {m.begin}, T({m.coefficient!r})}}," for m in plan.matrices]
    lines = "\n    ".join
    squares = ", ".join(f"Square<{side}>" for side in sorted({plan.thread_side(m) for m in plan.matrices}))
    sizes = f"in_dim = {plan.in_dim}, out_dim = {plan.out_dim}, attributes = {plan.attributes}"
    return f"""namespace {{
EQ_TABLE Written block_table[] = {{
    {lines(blocks)}
}};
EQ_TABLE Matrix matrix_table[] = {{
    {lines(matrices)}
}};
EQ_TABLE int side_table[] = {{{", ".join(str(plan.side(m)) for m in plan.matrices)}}};
struct Problem {{
  static constexpr int {sizes};
  static constexpr int blocks = {len(blocks)}, matrices = {len(matrices)};
  static constexpr int64_t weights = {plan.weights};
  static EQ_FN Written block(int n) {{ return block_table[n]; }}
  static EQ_FN Matrix matrix(int n) {{ return matrix_table[n]; }}
  static EQ_FN int side(int n) {{ return side_table[n]; }}
}};
}}  // namespace
EQ_EXPORT_LINEAR_WEIGHTS(Problem, {squares})
"""

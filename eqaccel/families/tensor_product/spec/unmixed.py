"""Products whose dense matrices of weights are the same for all rows: what is left without them, and where they belong.

By linearity, a matrix that all edges share multiplies the sum of their pairs of channels: one matrix product a node
instead of one an edge. Rows of a batch have nothing to add up, and there scalars of x or y may come first: their
product with a path's weights is a smaller matrix for each row, which couples to the other operand, and is written to
memory in place of all pairs of channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eqaccel.families.tensor_product.spec.instruction import ConnectionMode, Instruction, Pairs
from eqaccel.families.tensor_product.spec.path import Path
from eqaccel.families.tensor_product.spec.tensor_product import TensorProductSpec
from eqaccel.irreps import Irrep, Irreps

_FEWEST_CHANNELS = 4
"""Of both operands, for scalars to come first: with fewer, all pairs are not much more than what else is moved."""


@dataclass(frozen=True)
class DenseMatrix:
    """A matrix of weights (pairs, mul) that mixes a block of pairs into a block of the output.

    Attributes:
        block: The block of pairs, of the output of the unmixed product.
        out: The block of the output of the whole.
        weights: Which weights they are: position among the paths that have weights.
    """

    block: int
    out: int
    weights: int


@dataclass(frozen=True)
class Scalars:
    """Scalars of a row, whose products with matrices of weights are weights of the unmixed product for this row.

    Attributes:
        of_x: Whether they are scalars of x; of y if not.
        offset: The first of them in a row.
        mul: How many there are.
        paths: Of each path whose weights (mul1, mul2, mul3) they multiply, its position among those that have weights,
            and the channels of the other operand. The products are one after the other.
    """

    of_x: bool
    offset: int
    mul: int
    paths: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class UnmixedProduct:
    """A product without its dense matrices.

    Attributes:
        spec: Its output begins with the blocks of the whole if it reaches any of them, then come the pairs. Behind the
            irreps of x and y stand scalars that are one, where those of the operand come first.
        matrices: What the pairs are multiplied by.
        weights: Number of weights of each path of the whole that has some.
        own_weights: Which of these the unmixed product has.
        reaches_output: Whether it reaches blocks of the whole itself.
        scalars: What its weights are made of, if they are not those of the whole.
        ones: How many scalars that are one x and y have.
    """

    spec: TensorProductSpec
    matrices: tuple[DenseMatrix, ...]
    weights: tuple[int, ...]
    own_weights: tuple[int, ...]
    reaches_output: bool
    scalars: tuple[Scalars, ...]
    ones: tuple[int, int]


_OWN_MODES = {Pairs.ALL: ConnectionMode.UVUV, Pairs.EQUAL: ConnectionMode.UUU, Pairs.ORDERED: ConnectionMode.UVU_LT_V}


def unmixed(spec: TensorProductSpec, *, by_rows: bool = False) -> UnmixedProduct | None:
    """The product without its dense matrices of weights; None if it has none.

    Args:
        spec: The whole.
        by_rows: Whether the whole is that of a batch, so that there are no sums over edges.
    """
    dense = [path for path in spec.paths if path.has_matrix]
    if not dense:
        return None
    weighted = [path for path in spec.paths if path.weight_offset is not None]
    rest = [path for path in spec.paths if not path.has_matrix]
    # Rows have weights of their own, or all have the same.
    may_begin = dense if by_rows and len(weighted) == len(dense) else []
    x, y = (_Side(of_x, spec, [path for path in may_begin if _begins(path) == of_x]) for of_x in (True, False))
    scalars = [*x.scalars(weighted), *y.scalars(weighted)]
    first = [weighted[number] for group in scalars for number, _ in group.paths]
    paired = [path for path in dense if path not in first]
    reaches_output = bool(rest or first)
    head = spec.irreps_out if reaches_output else Irreps("")
    instructions = [Instruction(p.in1, p.in2, p.out, p.mode, p.weight_offset is not None) for p in rest]
    instructions += [Instruction(x.block(p), y.block(p), p.out, ConnectionMode.UVW, has_weight=True) for p in first]
    for number, path in enumerate(paired, len(head)):
        instructions.append(Instruction(path.in1, path.in2, number, _OWN_MODES[path.mode.pairs], has_weight=False))
    product = TensorProductSpec.of_coefficients(
        (x.irreps, y.irreps, Irreps([*head, *((path.pairs, path.ir3) for path in paired)])),
        instructions,
        [path.coefficient for path in (*rest, *first, *paired)],
        spec.shared_weights and not first,
    )
    matrices = tuple(DenseMatrix(block, path.out, weighted.index(path)) for block, path in enumerate(paired, len(head)))
    return UnmixedProduct(
        product,
        matrices,
        weights=tuple(path.weight_numel for path in weighted),
        own_weights=tuple(number for number, path in enumerate(weighted) if not path.has_matrix),
        reaches_output=reaches_output,
        scalars=tuple(scalars),
        ones=(len(x.ones), len(y.ones)),
    )


def _begins(path: Path) -> bool | None:
    """Whether scalars of x come first, True, or of y, False, if that at least halves what is written; else None."""
    if path.mode is not ConnectionMode.UVW or min(path.mul1, path.mul2) < _FEWEST_CHANNELS:
        return None
    pairs = path.pairs * path.ir3.dim
    written = {True: path.mul2 * path.mul3, False: path.mul1 * path.mul3}
    sides = [of_x for of_x, ir in ((True, path.ir1), (False, path.ir2)) if ir.l == 0 and 2 * written[of_x] <= pairs]
    return min(sides, key=written.__getitem__, default=None)


@dataclass(frozen=True)
class _Side:
    """An operand, and the paths whose scalars of it come first: what they multiply afterwards is one of its ones."""

    of_x: bool
    whole: TensorProductSpec
    paths: list[Path]

    @property
    def ones(self) -> list[Irrep]:
        """Irreps of these scalars."""
        return sorted({path.ir1 if self.of_x else path.ir2 for path in self.paths})

    @property
    def irreps(self) -> Irreps:
        """Those of the operand, and the ones behind them."""
        own = self.whole.irreps_in1 if self.of_x else self.whole.irreps_in2
        return Irreps([*own, *((1, ir) for ir in self.ones)])

    def block(self, path: Path) -> int:
        """The block that a path reads of it, be it a one."""
        number, ir = (path.in1, path.ir1) if self.of_x else (path.in2, path.ir2)
        return len(self.irreps) - len(self.ones) + self.ones.index(ir) if path in self.paths else number

    def scalars(self, weighted: Sequence[Path]) -> list[Scalars]:
        """The blocks of scalars, with the paths that read them."""
        readers: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for path in self.paths:
            x, y = (path.x_offset, path.mul1), (path.y_offset, path.mul2)
            block, other = (x, path.mul2) if self.of_x else (y, path.mul1)
            readers.setdefault(block, []).append((weighted.index(path), other))
        return [Scalars(self.of_x, *block, tuple(paths)) for block, paths in readers.items()]

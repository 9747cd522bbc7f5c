"""Products whose dense matrices of weights are the same for all rows: what is left without them, and where they belong.

By linearity, a matrix that all edges share multiplies the sum of their pairs of channels: one matrix product a node
instead of one an edge. Rows of a batch have nothing to add up, and there scalars of x or y may come first: their
product with a path's weights is a smaller matrix for each row, which couples to the other operand, and is written to
memory in place of all pairs of channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eqaccel.families.tensor_product.spec.instruction import ConnectionMode, Instruction, Mixing, Pairs
from eqaccel.families.tensor_product.spec.path import Path
from eqaccel.families.tensor_product.spec.tensor_product import TensorProductSpec
from eqaccel.irreps import Irreps

_FEWEST_CHANNELS = 4
"""Of both operands, for scalars to come first: with fewer, all pairs are not much more than what else is moved."""


@dataclass(frozen=True)
class DenseMatrix:
    """A matrix of weights (pairs, mul) that mixes a block of pairs into a block of the output.

    Attributes:
        block: The block of pairs, of the output of the unmixed product.
        out: The block of the output of the whole.
        weights: Which weights they are: position among the paths that have weights.
        pairs: Number of rows of the matrix.
        mul: Number of its columns.
    """

    block: int
    out: int
    weights: int
    pairs: int
    mul: int


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
        own: The blocks of the output that it reaches itself.
        scalars: What its weights are made of, if they are not those of the whole.
        ones: How many scalars that are one x and y have.
    """

    spec: TensorProductSpec
    matrices: tuple[DenseMatrix, ...]
    weights: tuple[int, ...]
    own_weights: tuple[int, ...]
    own: frozenset[int]
    scalars: tuple[Scalars, ...]
    ones: tuple[int, int]


_OWN_MODES = {Pairs.ALL: ConnectionMode.UVUV, Pairs.EQUAL: ConnectionMode.UUU, Pairs.ORDERED: ConnectionMode.UVU_LT_V}


def unmixed(spec: TensorProductSpec, *, by_rows: bool = False) -> UnmixedProduct | None:
    """The product without its dense matrices of weights; None if it has none.

    Args:
        spec: The whole.
        by_rows: Whether the whole is that of a batch, so that there are no sums over edges.
    """
    dense = [path for path in spec.paths if _is_dense(path)]
    if not dense:
        return None
    weighted = [path for path in spec.paths if path.weight_offset is not None]
    # Rows have weights of their own, or all have the same.
    sides = {path: _side_of_scalars(path) for path in dense} if by_rows and len(weighted) == len(dense) else {}
    of_x, of_y = ([path for path in dense if sides.get(path) == side] for side in ("x", "y"))
    scalars = [*_scalars(of_x, weighted, of_x=True), *_scalars(of_y, weighted, of_x=False)]
    first = [weighted[number] for group in scalars for number, _ in group.paths]
    paired = [path for path in dense if path not in first]
    rest = [path for path in spec.paths if not _is_dense(path)]
    head = spec.irreps_out if rest or first else Irreps("")
    ones1, ones2 = sorted({path.ir1 for path in of_x}), sorted({path.ir2 for path in of_y})
    irreps1, irreps2 = (
        Irreps([*spec.irreps_in1, *((1, ir) for ir in ones1)]),
        Irreps([*spec.irreps_in2, *((1, ir) for ir in ones2)]),
    )
    instructions = [Instruction(p.in1, p.in2, p.out, p.mode, p.weight_offset is not None) for p in rest]
    for path in first:
        in1 = len(spec.irreps_in1) + ones1.index(path.ir1) if path in of_x else path.in1
        in2 = len(spec.irreps_in2) + ones2.index(path.ir2) if path in of_y else path.in2
        instructions.append(Instruction(in1, in2, path.out, ConnectionMode.UVW, has_weight=True))
    for number, path in enumerate(paired, len(head)):
        instructions.append(Instruction(path.in1, path.in2, number, _OWN_MODES[path.mode.pairs], has_weight=False))
    out = Irreps([*head, *((path.pairs, path.ir3) for path in paired)])
    product = TensorProductSpec.of_coefficients(
        (irreps1, irreps2, out),
        instructions,
        [path.coefficient for path in (*rest, *first, *paired)],
        spec.shared_weights and not first,
    )
    matrices = tuple(
        DenseMatrix(block, path.out, weighted.index(path), path.pairs, path.mul3)
        for block, path in enumerate(paired, len(head))
    )
    return UnmixedProduct(
        product,
        matrices,
        tuple(path.weight_numel for path in weighted),
        tuple(number for number, path in enumerate(weighted) if not _is_dense(path)),
        frozenset(path.out for path in (*rest, *first)),
        tuple(scalars),
        (len(ones1), len(ones2)),
    )


def _is_dense(path: Path) -> bool:
    return path.mode.mixing is Mixing.DENSE and path.weight_offset is not None


def _side_of_scalars(path: Path) -> str:
    """The operand whose scalars come first, "x" or "y", if that at least halves the numbers to write; else ""."""
    if path.mode is not ConnectionMode.UVW or min(path.mul1, path.mul2) < _FEWEST_CHANNELS:
        return ""
    pairs = path.pairs * path.ir3.dim
    written = {"x": path.mul2 * path.mul3, "y": path.mul1 * path.mul3}
    sides = [side for side, ir in (("x", path.ir1), ("y", path.ir2)) if ir.l == 0 and 2 * written[side] <= pairs]
    return min(sides, key=written.__getitem__, default="")


def _scalars(paths: Sequence[Path], weighted: Sequence[Path], *, of_x: bool) -> list[Scalars]:
    """Blocks of scalars and the paths that read them."""
    readers: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for path in paths:
        block, other = ((path.x_offset, path.mul1), path.mul2) if of_x else ((path.y_offset, path.mul2), path.mul1)
        readers.setdefault(block, []).append((weighted.index(path), other))
    return [Scalars(of_x, *block, tuple(found)) for block, found in readers.items()]

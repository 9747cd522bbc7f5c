"""Products whose dense matrices of weights are the same for all rows: what is left without them, and where they belong.

By linearity, a matrix that all edges share multiplies the sum of their pairs of channels: one matrix product a node
instead of one an edge.
"""

from __future__ import annotations

from dataclasses import dataclass

from eqaccel.families.tensor_product.spec.instruction import ConnectionMode, Instruction, Mixing, Pairs
from eqaccel.families.tensor_product.spec.path import Path
from eqaccel.families.tensor_product.spec.tensor_product import TensorProductSpec
from eqaccel.irreps import Irreps


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
class UnmixedProduct:
    """A product without its dense matrices.

    Attributes:
        spec: Its output begins with the blocks of the whole if it reaches any of them, then come the pairs.
        matrices: What the pairs are multiplied by.
        weights: Number of weights of each path of the whole that has some.
        own_weights: Which of these the unmixed product has.
        own: The blocks of the output that it reaches itself.
    """

    spec: TensorProductSpec
    matrices: tuple[DenseMatrix, ...]
    weights: tuple[int, ...]
    own_weights: tuple[int, ...]
    own: frozenset[int]


_OWN_MODES = {Pairs.ALL: ConnectionMode.UVUV, Pairs.EQUAL: ConnectionMode.UUU, Pairs.ORDERED: ConnectionMode.UVU_LT_V}


def unmixed(spec: TensorProductSpec) -> UnmixedProduct | None:
    """The product without its dense matrices of weights; None if it has none."""
    dense = [path for path in spec.paths if _is_dense(path)]
    if not dense:
        return None
    rest = [path for path in spec.paths if not _is_dense(path)]
    head = spec.irreps_out if rest else Irreps("")
    out = Irreps([*head, *((path.pairs, path.ir3) for path in dense)])
    instructions = [Instruction(p.in1, p.in2, p.out, p.mode, p.weight_offset is not None) for p in rest]
    for number, path in enumerate(dense, len(head)):
        instructions.append(Instruction(path.in1, path.in2, number, _OWN_MODES[path.mode.pairs], has_weight=False))
    coefficients = [path.coefficient for path in (*rest, *dense)]
    product = TensorProductSpec.of_coefficients(
        (spec.irreps_in1, spec.irreps_in2, out), instructions, coefficients, spec.shared_weights
    )
    weighted = [path for path in spec.paths if path.weight_offset is not None]
    matrices = tuple(
        DenseMatrix(block, path.out, weighted.index(path), path.pairs, path.mul3)
        for block, path in enumerate(dense, len(head))
    )
    own_weights = tuple(number for number, path in enumerate(weighted) if not _is_dense(path))
    numbers = tuple(path.weight_numel for path in weighted)
    return UnmixedProduct(product, matrices, numbers, own_weights, frozenset(path.out for path in rest))


def _is_dense(path: Path) -> bool:
    return path.mode.mixing is Mixing.DENSE and path.weight_offset is not None

"""The instructions of e3nn's products: which blocks they couple, how, and into what."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from eqaccel.errors import SpecError
from eqaccel.families.tensor_product import ConnectionMode, Instruction
from eqaccel.irreps import Irrep, IrrepLike, Irreps, IrrepsLike


class Definition(NamedTuple):
    """What an e3nn product is made of.

    Attributes:
        irreps_in1: Of the first operand; its blocks may be others than those given, in the same order.
        irreps_in2: Of the second operand, likewise.
        irreps_out: Of the output.
        instructions: The couplings.
    """

    irreps_in1: Irreps
    irreps_in2: Irreps
    irreps_out: Irreps
    instructions: tuple[Instruction, ...]


class ProductInstruction(NamedTuple):
    """An entry of `instructions` of a product, as e3nn has it.

    Attributes:
        i_in1: Index of the block of the first operand.
        i_in2: Index of the block of the second operand.
        i_out: Index of the block of the output.
        connection_mode: How multiplicities connect, such as ``uvw``.
        has_weight: Whether it has weights.
        path_weight: The factor in front of the coupling, all normalisations included.
        path_shape: Shape of its weights.
    """

    i_in1: int
    i_in2: int
    i_out: int
    connection_mode: str
    has_weight: bool
    path_weight: float
    path_shape: tuple[int, ...]


def fully_connected(irreps_in1: IrrepsLike, irreps_in2: IrrepsLike, irreps_out: IrrepsLike) -> Definition:
    """Every coupling of two blocks into a block of the output, with weights for all triples of channels."""
    in1, in2, out = Irreps(irreps_in1), Irreps(irreps_in2), Irreps(irreps_out)
    instructions = (
        Instruction(i, j, k, ConnectionMode.UVW)
        for i, (_, ir1) in enumerate(in1)
        for j, (_, ir2) in enumerate(in2)
        for k, (_, ir3) in enumerate(out)
        if ir3 in ir1 * ir2
    )
    return Definition(in1, in2, out, tuple(instructions))


def elementwise(
    irreps_in1: IrrepsLike, irreps_in2: IrrepsLike, filter_ir_out: Iterable[IrrepLike] | None = None
) -> Definition:
    """Every coupling of irreps of the same number, counted with their multiplicities.

    Raises:
        SpecError: If the operands have other numbers of irreps.
    """
    in1, in2 = Irreps(irreps_in1).simplify(), Irreps(irreps_in2).simplify()
    if in1.num_irreps != in2.num_irreps:
        raise SpecError(
            f"irreps_in2: expected as many irreps as irreps_in1 has, {in1.num_irreps} in {in1}, got {in2.num_irreps} "
            f"in {in2}"
        )
    wanted = _wanted(filter_ir_out)
    ends = sorted({*_ends(in1), *_ends(in2)})
    cut1, cut2 = _cut(in1, ends), _cut(in2, ends)
    out: list[tuple[int, Irrep]] = []
    instructions = []
    for i, ((mul, ir1), (_, ir2)) in enumerate(zip(cut1, cut2, strict=True)):
        for ir in ir1 * ir2:
            if wanted is None or ir in wanted:
                instructions.append(Instruction(i, i, len(out), ConnectionMode.UUU, has_weight=False))
                out.append((mul, ir))
    return Definition(cut1, cut2, Irreps(out), tuple(instructions))


def full(
    irreps_in1: IrrepsLike, irreps_in2: IrrepsLike, filter_ir_out: Iterable[IrrepLike] | None = None
) -> Definition:
    """Every coupling of two blocks, with an output for each pair of channels; outputs are sorted by irrep."""
    in1, in2 = Irreps(irreps_in1).simplify(), Irreps(irreps_in2).simplify()
    wanted = _wanted(filter_ir_out)
    out: list[tuple[int, Irrep]] = []
    instructions = []
    for i, (mul1, ir1) in enumerate(in1):
        for j, (mul2, ir2) in enumerate(in2):
            for ir in ir1 * ir2:
                if wanted is None or ir in wanted:
                    instructions.append(Instruction(i, j, len(out), ConnectionMode.UVUV, has_weight=False))
                    out.append((mul1 * mul2, ir))
    return _sorted(in1, in2, out, instructions)


def square(
    irreps_in: IrrepsLike,
    irreps_out: IrrepsLike | None = None,
    filter_ir_out: Iterable[IrrepLike] | None = None,
    irrep_normalization: str = "component",
) -> Definition:
    """The couplings of an operand with itself, each pair of channels once.

    Args:
        irreps_in: Of the operand.
        irreps_out: Of the output, which then is a mixture of the pairs, with weights; without, it is the pairs.
        filter_ir_out: Irreps of the output that are kept, if `irreps_out` is not given.
        irrep_normalization: ``component``, ``norm`` or ``none``.

    Returns:
        The definition; variances are in the path weights of its instructions, for a product without normalisation of
        irreps.

    Raises:
        SpecError: If there are both `irreps_out` and `filter_ir_out`, or the normalisation is none of these.
    """
    if irrep_normalization not in ("component", "norm", "none"):
        raise SpecError(f"irrep_normalization: expected 'component', 'norm' or 'none', got {irrep_normalization!r}")
    irreps = Irreps(irreps_in).simplify()
    if irreps_out is None:
        return _full_square(irreps, _wanted(filter_ir_out), irrep_normalization)
    if filter_ir_out is not None:
        raise SpecError("filter_ir_out: expected none where irreps_out is given, got both")
    out = Irreps(irreps_out).simplify()
    instructions = []
    for i, (mul, ir1) in enumerate(irreps):
        for j, (_, ir2) in enumerate(irreps[i:], start=i):
            for k, (_, ir) in enumerate(out):
                if ir not in ir1 * ir2:
                    continue
                variance = _variance(ir1, ir2, ir, irrep_normalization)
                if i < j:
                    instructions.append(Instruction(i, j, k, ConnectionMode.UVW, True, variance))
                    continue
                if mul > 1:
                    instructions.append(Instruction(i, i, k, ConnectionMode.U_LT_VW, True, variance))
                if ir.l % 2 == 0:
                    own = _own_variance(ir1, ir, irrep_normalization)
                    instructions.append(Instruction(i, i, k, ConnectionMode.UUW, True, own))
    return Definition(irreps, irreps, out, tuple(instructions))


def _full_square(irreps: Irreps, wanted: frozenset[Irrep] | None, irrep_normalization: str) -> Definition:
    out: list[tuple[int, Irrep]] = []
    instructions = []
    for i, (mul1, ir1) in enumerate(irreps):
        for j, (mul2, ir2) in enumerate(irreps[i:], start=i):
            for ir in ir1 * ir2:
                if wanted is not None and ir not in wanted:
                    continue
                variance = _variance(ir1, ir2, ir, irrep_normalization)
                found = []
                if i < j:
                    found.append((ConnectionMode.UVUV, mul1 * mul2, variance))
                if i == j and mul1 > 1:
                    found.append((ConnectionMode.UVU_LT_V, mul1 * (mul1 - 1) // 2, variance))
                if i == j and ir.l % 2 == 0:
                    found.append((ConnectionMode.UUU, mul1, _own_variance(ir1, ir, irrep_normalization)))
                for mode, mul, weight in found:
                    instructions.append(Instruction(i, j, len(out), mode, False, weight))
                    out.append((mul, ir))
    return _sorted(irreps, irreps, out, instructions)


def _variance(ir1: Irrep, ir2: Irrep, ir: Irrep, irrep_normalization: str) -> float:
    """That makes the variance of a coupling of two different operands one."""
    return float({"component": ir.dim, "norm": ir1.dim * ir2.dim, "none": 1}[irrep_normalization])


def _own_variance(ir1: Irrep, ir: Irrep, irrep_normalization: str) -> float:
    """The same for an operand with itself, whose components are not independent."""
    if irrep_normalization == "component":
        return ir.dim / (ir1.dim + 2) if ir.l == 0 else ir.dim / 2
    if irrep_normalization == "norm":
        return float(ir.dim * ir1.dim) if ir.l == 0 else ir1.dim * (ir1.dim + 2) / 2
    return 1.0


def _sorted(
    in1: Irreps, in2: Irreps, out: Sequence[tuple[int, Irrep]], instructions: Iterable[Instruction]
) -> Definition:
    """A definition whose output blocks are sorted by irrep."""
    irreps, place, _ = Irreps(out).sort()
    moved = (
        Instruction(item.i_in1, item.i_in2, place[item.i_out], item.mode, item.has_weight, item.path_weight)
        for item in instructions
    )
    return Definition(in1, in2, irreps, tuple(moved))


def _wanted(filter_ir_out: Iterable[IrrepLike] | None) -> frozenset[Irrep] | None:
    return None if filter_ir_out is None else frozenset(map(Irrep.parse, filter_ir_out))


def _ends(irreps: Irreps) -> list[int]:
    """After how many irreps each block ends."""
    return [irreps[: index + 1].num_irreps for index in range(len(irreps))]


def _cut(irreps: Irreps, ends: Sequence[int]) -> Irreps:
    """The same irreps in blocks that end at given places, among which are the ends of its own."""
    own, blocks, start = _ends(irreps), [], 0
    for end in ends:
        block = next(index for index, last in enumerate(own) if last >= end)
        blocks.append((end - start, irreps[block].ir))
        start = end
    return Irreps(blocks)

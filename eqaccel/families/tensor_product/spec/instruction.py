"""Instructions: which blocks a tensor product couples, and how; e3nn's tuples, with names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from operator import index as as_index
from typing import Any, TypeAlias

from eqaccel.errors import SpecError


class Pairs(Enum):
    """Which channels u of in1 and v of in2 are coupled, in the order (u, v), v fastest."""

    ALL = "all"
    EQUAL = "u = v"
    ORDERED = "u < v"

    def count(self, mul1: int, mul2: int) -> int:
        """Number of pairs."""
        return {Pairs.ALL: mul1 * mul2, Pairs.EQUAL: mul1, Pairs.ORDERED: mul1 * (mul1 - 1) // 2}[self]


class Mixing(Enum):
    """What becomes of the pairs: the channels of the output."""

    OWN = "a channel for each pair"
    OVER_V = "a channel for each u, a sum over v"
    OVER_U = "a channel for each v, a sum over u"
    DENSE = "a matrix of weights from all pairs to all channels"


class ConnectionMode(Enum):
    """How the multiplicities u (in1), v (in2) and w (out) of an instruction connect; e3nn's names."""

    UVW = "uvw"
    UVU = "uvu"
    UVV = "uvv"
    UUW = "uuw"
    UUU = "uuu"
    UVUV = "uvuv"
    UVU_LT_V = "uvu<v"
    U_LT_VW = "u<vw"

    @property
    def pairs(self) -> Pairs:
        """Which pairs are coupled."""
        return _MEANINGS[self][0]

    @property
    def mixing(self) -> Mixing:
        """What becomes of them."""
        return _MEANINGS[self][1]

    def __str__(self) -> str:
        return self.value

    def weight_shape(self, mul1: int, mul2: int, mul3: int) -> tuple[int, ...]:
        """The weights of an instruction, as in e3nn: its last index runs fastest."""
        pairs = (mul1, mul2) if self.pairs is Pairs.ALL else (self.pairs.count(mul1, mul2),)
        return (*pairs, mul3) if self.mixing is Mixing.DENSE else pairs

    def summed(self, mul1: int, mul2: int) -> int:
        """Pairs that are added up to an element of the output."""
        if self.mixing is Mixing.DENSE:
            return self.pairs.count(mul1, mul2)
        return {Mixing.OWN: 1, Mixing.OVER_V: mul2, Mixing.OVER_U: mul1}[self.mixing]

    def misfit(self, mul1: int, mul2: int, mul3: int, has_weight: bool) -> str | None:
        """What is wrong with the multiplicities of an instruction; None if nothing is."""
        if self.pairs is not Pairs.ALL and mul1 != mul2:
            return "expected equal multiplicities of in1 and in2"
        if self.mixing is not Mixing.DENSE:
            expected, of = {
                Mixing.OWN: (self.pairs.count(mul1, mul2), f"multiplicity {self.pairs.count(mul1, mul2)} of out"),
                Mixing.OVER_V: (mul1, "equal multiplicities of in1 and out"),
                Mixing.OVER_U: (mul2, "equal multiplicities of in2 and out"),
            }[self.mixing]
            return None if mul3 == expected else f"expected {of}"
        if has_weight or (self is ConnectionMode.UUW and mul3 == 1):
            return None
        return "expected weights" + (", or multiplicity 1 of out" if self is ConnectionMode.UUW else "")


_MEANINGS = {
    ConnectionMode.UVW: (Pairs.ALL, Mixing.DENSE),
    ConnectionMode.UVU: (Pairs.ALL, Mixing.OVER_V),
    ConnectionMode.UVV: (Pairs.ALL, Mixing.OVER_U),
    ConnectionMode.UUW: (Pairs.EQUAL, Mixing.DENSE),
    ConnectionMode.UUU: (Pairs.EQUAL, Mixing.OWN),
    ConnectionMode.UVUV: (Pairs.ALL, Mixing.OWN),
    ConnectionMode.UVU_LT_V: (Pairs.ORDERED, Mixing.OWN),
    ConnectionMode.U_LT_VW: (Pairs.ORDERED, Mixing.DENSE),
}


@dataclass(frozen=True)
class Instruction:
    """One coupling of an in1 block with an in2 block into an out block.

    Attributes:
        i_in1: Index of the block of the first input.
        i_in2: Index of the block of the second input.
        i_out: Index of the block of the output; several instructions may add to the same one.
        mode: How multiplicities connect.
        has_weight: Whether the instruction consumes weights, of the shape that its mode says.
        path_weight: What this instruction contributes to the output, >= 0. As in e3nn it is a variance: the output
            scales with its square root.
    """

    i_in1: int
    i_in2: int
    i_out: int
    mode: ConnectionMode = ConnectionMode.UVU
    has_weight: bool = True
    path_weight: float = 1.0

    @classmethod
    def parse(cls, value: InstructionLike, number: int) -> Instruction:
        """Reads an instruction from e3nn's tuple (i_in1, i_in2, i_out, mode, has_weight, path_weight).

        Args:
            value: An `Instruction`, or a sequence of its first 3 to 6 fields, the mode as text or enum.
            number: Position in the list of instructions, named by errors.

        Raises:
            SpecError: If `value` is neither, or a field has the wrong type.
        """
        fields = [getattr(value, name) for name in cls.__dataclass_fields__] if isinstance(value, cls) else value
        if isinstance(fields, str) or not isinstance(fields, Sequence) or not 3 <= len(fields) <= 6:
            # e3nn's own objects have a seventh field, and their path_weight is a coefficient, not a variance.
            raise SpecError(
                f"instruction {number}: expected (i_in1, i_in2, i_out, mode, has_weight, path_weight), of which the "
                f"last three may be missing, got {value!r}; use TensorProductSpec.from_e3nn for an e3nn module"
            )
        try:
            i_in1, i_in2, i_out = map(as_index, fields[:3])
            mode = ConnectionMode(fields[3]) if len(fields) > 3 else ConnectionMode.UVU
            path_weight = float(fields[5]) if len(fields) > 5 else 1.0
        except (TypeError, ValueError) as error:
            raise SpecError(
                f"instruction {number}: expected three block indices, a mode among "
                f"{', '.join(map(str, ConnectionMode))}, a flag and a number, got {value!r}"
            ) from error
        if not (math.isfinite(path_weight) and path_weight >= 0):
            raise SpecError(f"instruction {number}: expected a finite path_weight >= 0, got {path_weight}")
        return cls(i_in1, i_in2, i_out, mode, bool(fields[4]) if len(fields) > 4 else True, path_weight)


InstructionLike: TypeAlias = Instruction | Sequence[Any]
"""What `Instruction.parse` reads."""

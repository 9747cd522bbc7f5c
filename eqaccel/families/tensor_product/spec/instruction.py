"""Instructions: which blocks a tensor product couples, and how; e3nn's tuples, with names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from operator import index as as_index
from typing import Any, TypeAlias

from eqaccel.errors import SpecError


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

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Instruction:
    """One coupling of an in1 block with an in2 block into an out block.

    Attributes:
        i_in1: Index of the block of the first input.
        i_in2: Index of the block of the second input.
        i_out: Index of the block of the output; several instructions may add to the same one.
        mode: How multiplicities connect.
        has_weight: Whether the instruction consumes weights, `mul` of them in mode uvu.
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

"""The first layer of radial networks, z = factor * SiLU(scale * x w), where SiLU(y) = y / (1 + exp(-y))."""

from __future__ import annotations

import math
from dataclasses import dataclass

from eqaccel.errors import SpecError

MOST_INPUTS = 16
MOST_OUTPUTS = 256
"""A thread of a GPU keeps its share of the weights in registers."""


@dataclass(frozen=True)
class RadialLayerSpec:
    """A layer that is so narrow that making its sums anew costs less than memory for them.

    Args:
        num_inputs: Columns of x, at most `MOST_INPUTS`.
        num_outputs: Columns of z, a multiple of four, at most `MOST_OUTPUTS`.
        factor: What the activation is multiplied by.
        scale: What its argument is multiplied by.

    Raises:
        SpecError: If a number is out of range.
    """

    num_inputs: int
    num_outputs: int
    factor: float = 1.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.num_inputs <= MOST_INPUTS:
            raise SpecError(f"num_inputs: expected 1 to {MOST_INPUTS}, got {self.num_inputs}")
        if not 4 <= self.num_outputs <= MOST_OUTPUTS or self.num_outputs % 4:
            raise SpecError(f"num_outputs: expected a multiple of 4 up to {MOST_OUTPUTS}, got {self.num_outputs}")
        for name in ("factor", "scale"):
            value = getattr(self, name)
            if not math.isfinite(value):
                raise SpecError(f"{name}: expected a finite number, got {value}")
            object.__setattr__(self, name, float(value))

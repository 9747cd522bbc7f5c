"""The activation factor * SiLU(scale * x), where SiLU(y) = y / (1 + exp(-y))."""

from __future__ import annotations

import math
from dataclasses import dataclass

from eqaccel.errors import SpecError


@dataclass(frozen=True)
class SiluSpec:
    """factor * SiLU(scale * x), as e3nn normalises activations and the weights in front of them.

    Args:
        factor: What the activation is multiplied by.
        scale: What its argument is multiplied by.

    Raises:
        SpecError: If one of them is not finite.
    """

    factor: float = 1.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("factor", "scale"):
            value = getattr(self, name)
            if not math.isfinite(value):
                raise SpecError(f"{name}: expected a finite number, got {value}")
            object.__setattr__(self, name, float(value))

"""Radial basis functions of edges, as MACE and NequIP have them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from eqaccel.errors import SpecError


@dataclass(frozen=True)
class RadialBasisSpec:
    """Functions f_n(r) = factor * sin(k_n r) / r * u(r) of the length r of an edge, with frequencies k_n.

    u(r) = 1 - (p+1)(p+2)/2 x^p + p(p+2) x^(p+1) - p(p+1)/2 x^(p+2), where x = r / r_max, is the polynomial cutoff of
    DimeNet (https://arxiv.org/abs/2003.03123); it is zero from r_max on.

    Args:
        num_basis: Functions; with none there is one output, factor * u(r).
        r_max: Cutoff, in the unit of lengths.
        power: p of the cutoff; 0 for functions without a cutoff.
        factor: What all of them are multiplied by.
        unit: The k_n are frequencies times this.
        is_undefined_at_zero: Whether functions are NaN at r = 0, as by a program that divides by r. Otherwise they have
            their limit.

    Raises:
        SpecError: If a number is out of range, or there is nothing to compute.
    """

    num_basis: int
    r_max: float
    power: int
    factor: float = 1.0
    unit: float = 1.0
    is_undefined_at_zero: bool = False

    def __post_init__(self) -> None:
        if self.num_basis < 0:
            raise SpecError(f"num_basis: expected 0 or more, got {self.num_basis}")
        if self.power < 0 or self.power == 1:
            raise SpecError(f"power: expected 2 or more, or 0 for no cutoff, got {self.power}")
        for name in ("r_max", "factor", "unit"):
            value = getattr(self, name)
            if not math.isfinite(value) or (name == "r_max" and value <= 0):
                raise SpecError(f"{name}: expected a {'positive' if name == 'r_max' else 'finite'} number, got {value}")
            object.__setattr__(self, name, float(value))
        if self.num_basis == 0 and self.power == 0:
            raise SpecError(
                "num_basis: expected 1 or more where there is no cutoff, got 0: there is nothing to compute"
            )

    @property
    def num_outputs(self) -> int:
        """Columns of z."""
        return max(self.num_basis, 1)

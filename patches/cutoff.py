"""Cutoffs of edges that eqaccel has kernels for."""

from __future__ import annotations

from typing import Any

from eqaccel.errors import PatchError


def polynomial_power(cutoff: Any) -> int:
    """The power of a polynomial cutoff of any library; raises `PatchError` if there is no kernel for it."""
    power = int(cutoff.p)
    if power != cutoff.p or power < 2:
        raise PatchError(f"no kernel for a cutoff of power {float(cutoff.p):g}")
    return power

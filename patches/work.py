"""Forces and stress against the energy: what it costs to move atoms must be what the forces say.

The energy difference between both ends of a short path is the integral of the slope that forces or stress predict, by
Simpson's rule over both ends and the middle. The integral by the trapezoidal rule differs from that by the second
derivative of the slope, and the error of Simpson's rule is of a higher order, so their difference bounds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from eqaccel.patches.structures import Structure

Outputs = Mapping[str, torch.Tensor]

_STEP = 1e-4
"""Length of half a path, relative to the cutoff: the energy changes by many digits, the slope by a few."""

_FORCE_PATHS = 2


@dataclass(frozen=True)
class Path:
    """A way through configuration space, and the slope of the energy along it.

    Attributes:
        output: Name of the output that predicts the slope.
        half: Length of half the path, in angstrom for forces, as a strain for stress.
        at: The structure at a place from -half to half.
        slope: The slope at a place that the outputs there predict, in eV per unit of length.
    """

    output: str
    half: float
    at: Callable[[float], Structure]
    slope: Callable[[float, Outputs], float]


@dataclass(frozen=True)
class Mismatch:
    """How far energies and slopes are apart, and what the integration may be off by; eV per unit of length."""

    error: float
    truncation: float


def paths(structure: Structure, outputs: Outputs) -> Iterator[Path]:
    """Random paths for the outputs that a model has, the same ones at every call."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(_FORCE_PATHS if "forces" in outputs else 0):
        direction = torch.randn(structure.positions.shape, generator=generator, dtype=torch.float64)
        yield _displacement(structure, direction / direction.norm())
    if "stress" in outputs and structure.periodic:
        strain = torch.randn(3, 3, generator=generator, dtype=torch.float64)
        strain = (strain + strain.T) / 2
        yield _deformation(structure, strain / strain.norm())


def mismatch(evaluate: Callable[[Structure], Outputs], path: Path, middle: Outputs) -> Mismatch:
    """Compares energies with slopes along a path.

    Args:
        evaluate: Runs a model.
        path: Where to go.
        middle: Outputs in the middle of the path.
    """
    ends = [(sign, evaluate(path.at(sign * path.half))) for sign in (-1.0, 1.0)]
    lower, upper = (path.slope(sign * path.half, outputs) for sign, outputs in ends)
    trapezoid = (lower + upper) / 2
    simpson = (lower + 4 * path.slope(0.0, middle) + upper) / 6
    climb = float(ends[1][1]["energy"].sum() - ends[0][1]["energy"].sum()) / (2 * path.half)
    return Mismatch(abs(climb - simpson), abs(trapezoid - simpson))


def _displacement(structure: Structure, direction: torch.Tensor) -> Path:
    return Path(
        "forces",
        _STEP * structure.cutoff,
        lambda place: structure.displaced(place * direction),
        lambda _, outputs: -float((outputs["forces"] * direction).sum()),
    )


def _deformation(structure: Structure, strain: torch.Tensor) -> Path:
    unit = torch.eye(3, dtype=torch.float64)

    def at(place: float) -> Structure:
        return structure.deformed(unit + place * strain, f"{structure.name} (deformed)")

    def slope(place: float, outputs: Outputs) -> float:
        # Stress tells of a deformation on top of that at `place`, and of the volume there.
        further = strain @ torch.linalg.inv(unit + place * strain)
        volume = torch.linalg.det(at(place).cell).abs()
        return float(volume * (outputs["stress"].view(3, 3) * further).sum())

    return Path("stress", _STEP, at, slope)

"""What two right evaluations of a model may differ by: bounds that follow from the dtype and from what is summed."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from eqaccel.patches.structures import Structure

STAGES = 32
"""Stages of a network, forward and backward, that each round what they hand on."""

ROUNDING = 32 * STAGES
"""Units of rounding, relative to the sum of absolute contributions, that two evaluations may be apart.

A sum of n terms adds about sqrt(n) roundings, and stages sum up to a thousand terms.
"""

FACTOR = 4.0
"""How much further from the truth a patched model may be than the original: both are random sums of roundings."""

Outputs = Mapping[str, torch.Tensor]


def distance(value: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference of two entries; infinite if shapes differ, NaN if an entry is."""
    if value.shape != expected.shape:
        return math.inf
    return float((value - expected).abs().max()) if value.numel() else 0.0


def scales(outputs: Outputs, structure: Structure) -> dict[str, float]:
    """Sums of the absolute values that each output is made of, which its rounding error is proportional to.

    Entries of one output are sums over the same neighbours, so they share a scale: the sum over all of them. Totals
    add their per-atom terms. An energy and a virial also add the work of all forces over one cutoff, since both are
    sums of terms of that size that may cancel.
    """
    found = {name: float(value.abs().sum()) for name, value in outputs.items()}
    work = found.get("forces", 0.0) * structure.cutoff
    for name in ("energy", "interaction_energy", "node_energy", "virials", "atomic_virials"):
        if name in found:
            found[name] += work + found.get("node_energy" if name == "energy" else "", 0.0)
    for name in ("stress", "atomic_stresses"):
        if name in found:
            found[name] += work / float(torch.linalg.det(structure.cell).abs())
    if "dipole" in found:
        found["dipole"] += found.get("atomic_dipoles", 0.0)
        if "charges" in outputs:
            found["dipole"] += float((outputs["charges"].abs()[:, None] * structure.positions.abs()).sum())
    return found


def derivative_scales(derivatives: Outputs, parameters: Mapping[str, float], contributions: float) -> dict[str, float]:
    """The same for derivatives of one loss, of which only sums that may have cancelled are known.

    A network is about linear in each of its tensors of parameters, so that the entries of one, times their derivatives,
    add up to contributions of the loss: on average an entry has its share of them. The derivative in positions is like
    a force.

    Args:
        derivatives: By name of the variable.
        parameters: Sum of the absolute values of each tensor of parameters; other variables are positions.
        contributions: Sum of the absolute values that the loss is made of.
    """
    found = {}
    for name, derivative in derivatives.items():
        if name not in parameters:
            found[name] = float(derivative.abs().sum())
            continue
        largest = float(derivative.abs().max()) if derivative.numel() else 0.0
        found[name] = largest + (contributions / parameters[name] if parameters[name] > 0 else 0.0)
    return found

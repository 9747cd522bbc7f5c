"""Whether what stands for a model gives its numbers: energies of atoms and forces, on generated structures."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from eqaccel.errors import ExportError
from eqaccel.patches.kind import ModelKind
from eqaccel.patches.potential import Potential
from eqaccel.patches.precision import rounding_of
from eqaccel.patches.rounding import FACTOR, ROUNDING
from eqaccel.patches.structures import Structure, small_structures
from eqaccel.patches.torch_state import model_device, rounding_unit, untouched_state

Edges = tuple[Tensor, Tensor, Tensor]
"""Vectors, edge index and types, as `Potential.forward` takes them."""


def check_agreement(kind: ModelKind, model: nn.Module, head: int, potential: Potential) -> None:
    """Compares a potential with an ordinary call of its model, on a small structure.

    Classes and fields of modules tell most of what a model does that its potential would leave out; its numbers tell
    all of it. So what is in a model in a way that nobody has thought of is not computed wrongly.

    Raises:
        ExportError: If they differ by more than rounding.
    """
    device, dtype = model_device(model), kind.dtype(model)
    with untouched_state(model):
        structure = _structure(*kind.extent(model))
        expected = kind.evaluate(model, structure, head)
        vectors, edge_index, types = edges_of(structure, device, dtype)
        found = potential(vectors, edge_index, types, len(types), 0)
    unit = max(rounding_unit(dtype, device), rounding_of(model))  # of what may be less precise than the dtype
    reason = difference(structure, found, expected, ROUNDING * torch.finfo(dtype).eps + FACTOR * unit)
    if reason and all(bool(value.isfinite().all()) for value in expected.values()):
        raise ExportError(
            f"model: expected a model that adds up energies of atoms, which depend on the vectors of edges alone, but "
            f"it does something else besides: {reason}; use the model from Python"
        )


@functools.lru_cache(maxsize=16)
def _structure(cutoff: float, num_elements: int) -> Structure:
    return small_structures(cutoff, num_elements)[0]


def edges_of(structure: Structure, device: torch.device | str, dtype: torch.dtype) -> Edges:
    """What a potential takes of a structure."""
    senders, receivers = structure.edge_index
    vectors = structure.positions[receivers] - structure.positions[senders] + structure.unit_shifts @ structure.cell
    return vectors.to(device, dtype), structure.edge_index.to(device), structure.species.to(device)


def difference(
    structure: Structure, found: tuple[Tensor, Tensor], expected: Mapping[str, Tensor], relative: float
) -> str:
    """In what a potential and a model differ; empty if by no more than rounding of the absolute contributions.

    Args:
        structure: The structure.
        found: Energies of atoms and the gradient in the vectors of edges, as the potential gives them.
        expected: What `ModelKind.evaluate` gives.
        relative: What rounding may come to, relative to these contributions.
    """
    energies, gradient = (value.to("cpu", torch.float64) for value in found)
    senders, receivers = structure.edge_index
    forces = torch.zeros_like(structure.positions).index_add(0, senders, gradient).index_add(0, receivers, -gradient)
    node_energies, pull = expected["node_energy"].reshape(-1), float(expected["forces"].abs().sum())
    work = float(node_energies.abs().sum()) + pull * structure.cutoff
    for name, value, reference, scale in (
        ("node energies", energies, node_energies, work),
        ("energy", energies.sum(), expected["energy"].sum(), work),
        ("forces", forces, expected["forces"], pull),
    ):
        error, bound = float((value - reference).abs().max()), relative * scale
        if not error <= bound:  # written so that NaN fails
            return f"{name} of the {structure.name} off by {error:.3e} where at most {bound:.3e} is rounding"
    return ""

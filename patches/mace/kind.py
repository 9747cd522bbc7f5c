"""MACE models: how to recognise one, and how to run it on a structure."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from eqaccel.patches.kind import ModelKind, Outputs, class_names
from eqaccel.patches.mace.export import MaceExporting
from eqaccel.patches.mace.stepping import MaceStepping
from eqaccel.patches.mace.swapping import MaceSwapping
from eqaccel.patches.mace.training import MaceTraining
from eqaccel.patches.mace.wrapping import MaceWrapping
from eqaccel.patches.structures import Structure
from eqaccel.patches.torch_state import model_device

_MODELS = frozenset({"MACE", "AtomicDipolesMACE", "AtomicDielectricMACE", "EnergyDipolesMACE"})

_RANKS: Mapping[str, int] = MappingProxyType(
    {
        "energy": 0,
        "interaction_energy": 0,
        "node_energy": 0,
        "forces": 1,
        "virials": 2,
        "stress": 2,
        "atomic_virials": 2,
        "atomic_stresses": 2,
        "charges": 0,
        "dipole": 1,
        "atomic_dipoles": 1,
        "polarizability": 2,
    }
)
_OUTPUTS = (*_RANKS, "polarizability_sh", "dmu_dr", "dalpha_dr")


class MaceKind(ModelKind):
    """The models of mace-torch, and subclasses of them."""

    name = "MACE"
    ranks = _RANKS
    swapping = MaceSwapping()
    exporting = MaceExporting()
    stepping = MaceStepping()
    wrapping = MaceWrapping()
    training = MaceTraining()

    def recognises(self, model: torch.nn.Module) -> bool:
        """Whether the model is one of MACE's classes, or derives from one."""
        return bool(class_names(model) & _MODELS) and isinstance(getattr(model, "interactions", None), torch.nn.Module)

    def extent(self, model: Any) -> tuple[float, int]:
        """The cutoff, and the number of elements."""
        return float(model.r_max), _num_elements(model)

    def inputs(self, model: torch.nn.Module, structure: Structure, head: int = 0) -> dict[str, Any]:
        """The dictionary that `mace.data.AtomicData` batches would give for one structure: neutral, and in no field."""
        device, dtype = model_device(model), self.dtype(model)
        num_atoms = len(structure.positions)
        one_hot = torch.nn.functional.one_hot(structure.species, _num_elements(model))
        floating = {
            "positions": structure.positions,
            "cell": structure.cell,
            "rcell": 2 * torch.pi * torch.linalg.inv(structure.cell.T),
            "volume": torch.linalg.det(structure.cell).reshape(1),
            "unit_shifts": structure.unit_shifts,
            "shifts": structure.unit_shifts @ structure.cell,
            "node_attrs": one_hot,
            "charges": torch.zeros(num_atoms),
            "total_charge": torch.zeros(1),
            "total_spin": torch.ones(1),
            "fermi_level": torch.zeros(1),
            "external_field": torch.zeros(1, 3),
        }
        for name, spec in (getattr(model, "embedding_specs", None) or {}).items():
            if name not in floating:
                per_atom = (num_atoms, spec["in_dim"]) if spec["type"] == "continuous" else (num_atoms,)
                floating[name] = torch.zeros((1,) if spec["per"] == "graph" else per_atom)
        integral = {
            "edge_index": structure.edge_index,
            "batch": torch.zeros(num_atoms, dtype=torch.int64),
            "ptr": torch.tensor([0, num_atoms]),
            "head": torch.tensor([head]),
            "pbc": torch.full((1, 3), structure.periodic),
        }
        # Copies, because models write into this dictionary and switch on gradients of what is in it.
        inputs = {name: tensor.to(device, dtype, copy=True) for name, tensor in floating.items()}
        return inputs | {name: tensor.to(device, copy=True) for name, tensor in integral.items()}

    def run(
        self, model: torch.nn.Module, structure: Structure, head: int = 0, training: bool = False
    ) -> tuple[Outputs, torch.Tensor]:
        """See `ModelKind.run`; virials and stresses of each atom only where they need not be differentiated."""
        inputs = self.inputs(model, structure, head)
        positions = inputs["positions"].requires_grad_(training)
        wanted = {"training": True} if training else _per_atom(model)
        outputs = model(inputs, **wanted, **_requests(model))
        found = {name: outputs.get(name) for name in _OUTPUTS}
        return {name: output for name, output in found.items() if isinstance(output, torch.Tensor)}, positions


def _requests(model: torch.nn.Module) -> dict[str, bool]:
    """Which outputs to ask a model's forward for: all that it can give with first derivatives."""
    kinds = class_names(model)
    if "AtomicDielectricMACE" in kinds:
        wanted = {"compute_dielectric_derivatives": True}
    elif "AtomicDipolesMACE" in kinds:
        wanted = {}
    else:
        wanted = {"compute_force": True, "compute_virials": True, "compute_stress": True}
    known = inspect.signature(model.forward).parameters
    return {name: value for name, value in wanted.items() if name in known}


def _per_atom(model: torch.nn.Module) -> dict[str, bool]:
    """The further request for virials and stresses of each atom, if the model's forward has it."""
    known = inspect.signature(model.forward).parameters
    asks_for_forces = "compute_force" in _requests(model)
    return {name: True for name in ("compute_atomic_stresses",) if asks_for_forces and name in known}


def _num_elements(model: Any) -> int:
    """Number of elements that a model embeds; some models are given a longer list of atomic numbers."""
    linear: Any = getattr(getattr(model, "node_embedding", None), "linear", None)
    return linear.irreps_in.dim if hasattr(linear, "irreps_in") else len(model.atomic_numbers)

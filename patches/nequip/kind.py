"""NequIP models: how to recognise one, and how to run it on a structure."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from eqaccel.errors import PatchError
from eqaccel.patches.kind import ModelKind, Outputs, class_names, classes_of
from eqaccel.patches.nequip.export import NequipExporting
from eqaccel.patches.nequip.files import NequipFiles
from eqaccel.patches.nequip.stepping import NequipStepping
from eqaccel.patches.nequip.swapping import NequipSwapping
from eqaccel.patches.nequip.training import NequipTraining
from eqaccel.patches.nequip.wrapping import NequipWrapping
from eqaccel.patches.structures import Structure
from eqaccel.patches.torch_state import model_device, training_mode

_GHOST_EXCHANGE = "LAMMPSMLIAPGhostExchangeModule"

_OUTPUTS: Mapping[str, str] = MappingProxyType(
    {
        "energy": "total_energy",
        "node_energy": "atomic_energy",
        "forces": "forces",
        "virials": "virial",
        "stress": "stress",
    }
)
"""The outputs, and their names in NequIP."""


class NequipKind(ModelKind):
    """The models of nequip, built in code, from a checkpoint or from a package."""

    name = "NequIP"
    ranks: Mapping[str, int] = MappingProxyType({"energy": 0, "node_energy": 0, "forces": 1, "virials": 2, "stress": 2})
    swapping = NequipSwapping()
    exporting = NequipExporting()
    stepping = NequipStepping()
    wrapping = NequipWrapping()
    training = NequipTraining()
    file_format = NequipFiles()

    def recognises(self, model: torch.nn.Module) -> bool:
        """Whether the model is what every model of the NequIP framework is wrapped in, Allegro's too."""
        return bool(classes_of("nequip", model) & {"GraphModel", "DictInputOutputWrapper"})

    def has_compiled_itself(self, model: torch.nn.Module) -> bool:
        """Whether a `CompileGraphModel` has been evaluated; it keeps what it has compiled."""
        return any(getattr(model, "_compiled_cache", ()))

    def dtype(self, model: torch.nn.Module) -> torch.dtype:
        """The type that the model was built in; some of its parameters are in float64 whatever that is."""
        built_in: torch.dtype | None = getattr(model, "model_dtype", None)
        if built_in is None:
            return super().dtype(model)
        block = next((module for module in model.modules() if "InteractionBlock" in class_names(module)), None)
        found = built_in if block is None else next(block.parameters()).dtype
        if found != built_in:
            raise PatchError(
                f"model: NequIP models keep the type that they were built in, expected {built_in}, got weights in "
                f"{found}; convert them back with model.to({built_in}), or build the model with another model_dtype"
            )
        return built_in

    def extent(self, model: Any) -> tuple[float, int]:
        """The cutoff, and the number of atom types."""
        return float(model.metadata["r_max"]), len(model.type_names)

    def inputs(self, model: torch.nn.Module, structure: Structure, head: int = 0) -> dict[str, Any]:
        """The dictionary that `nequip.data.from_ase` and a neighbour list would give for one structure.

        NequIP takes float64 whatever it computes in. An edge starts at its receiver; since the list holds every pair in
        both directions, it needs no turning around.
        """
        inputs: dict[str, Any] = {
            "pos": structure.positions,
            "cell": structure.cell[None],
            "edge_cell_shift": structure.unit_shifts,
            "edge_index": structure.edge_index,
            "atom_types": structure.species,
        }
        for module in model.modules():  # fields such as a total charge, each with the smallest value that it may have
            for field, smallest in getattr(module, "categorical_graph_field_embed_shifts", {}).items():
                inputs[field] = torch.tensor([[smallest]])
        # Copies, because models switch on gradients of what is in it.
        inputs = {name: tensor.to(model_device(model), copy=True) for name, tensor in inputs.items()}
        if any(_GHOST_EXCHANGE in class_names(module) for module in model.modules()):
            inputs["lmp_mliap_data"] = _NoGhosts(len(structure.positions))
        return inputs

    def run(
        self, model: torch.nn.Module, structure: Structure, head: int = 0, training: bool = False
    ) -> tuple[Outputs, torch.Tensor]:
        """See `ModelKind.run`; forces that the model leaves to others are added."""
        inputs = self.inputs(model, structure, head)
        positions = inputs["pos"].requires_grad_()
        with training_mode(model) if training else contextlib.nullcontext():
            outputs = model(inputs)
            if "forces" not in outputs:
                energy = outputs["total_energy"].sum()
                outputs["forces"] = -torch.autograd.grad(energy, positions, create_graph=model.training)[0]
        found = {name: outputs.get(field) for name, field in _OUTPUTS.items()}
        return {name: output for name, output in found.items() if isinstance(output, torch.Tensor)}, positions


class _NoGhosts:
    """Stands in for LAMMPS where a model prepared for ML-IAP asks for the features of ghosts, and there are none."""

    def __init__(self, num_atoms: int) -> None:
        self.nlocal = self.ntotal = num_atoms

    def forward_exchange(self, features: torch.Tensor, out: torch.Tensor, _width: int) -> None:
        """What every local atom has is what there is."""
        out.copy_(features)

    reverse_exchange = forward_exchange

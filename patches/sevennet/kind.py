"""SevenNet models: how to recognise one, and how to run it on a structure."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from eqaccel.patches.kind import ModelKind, Outputs, classes_of
from eqaccel.patches.sevennet import keys
from eqaccel.patches.sevennet.export import SevennetExporting
from eqaccel.patches.sevennet.files import SevennetFiles
from eqaccel.patches.sevennet.parts import atomic_numbers, modalities, one_hot_in
from eqaccel.patches.sevennet.stepping import SevennetStepping
from eqaccel.patches.sevennet.swapping import SevennetSwapping
from eqaccel.patches.sevennet.wrapping import SevennetWrapping
from eqaccel.patches.structures import Structure
from eqaccel.patches.torch_state import model_device, training_mode

_VOIGT = ((0, 3, 5), (3, 1, 4), (5, 4, 2))
"""Where the components of a tensor are among SevenNet's xx, yy, zz, xy, yz, zx."""


class SevennetKind(ModelKind):
    """The models of sevenn, built in code or from a checkpoint."""

    name = "SevenNet"
    # SevenNet writes six of the nine components of the virial of an atom, which do not turn by themselves.
    ranks: Mapping[str, int] = MappingProxyType({"energy": 0, "node_energy": 0, "forces": 1, "stress": 2})
    swapping = SevennetSwapping()
    exporting = SevennetExporting()
    stepping = SevennetStepping()
    wrapping = SevennetWrapping()
    file_format = SevennetFiles()

    def recognises(self, model: torch.nn.Module) -> bool:
        """Whether the model is the sequence of modules that all models of SevenNet are."""
        return "AtomGraphSequential" in classes_of("sevenn", model)

    def extent(self, model: Any) -> tuple[float, int]:
        """The cutoff, and the number of elements."""
        return float(model.cutoff), len(atomic_numbers(model))

    def inputs(self, model: Any, structure: Structure, head: int = 0) -> dict[str, Any]:
        """The data that SevenNet's calculator or data loader would make of one structure; `head` numbers modalities.

        An edge of SevenNet's starts at its receiver; since the list holds every pair in both directions, it needs no
        turning around.
        """
        device, dtype = model_device(model), self.dtype(model)
        num_atoms = len(structure.positions)
        known = atomic_numbers(model)
        several = (lambda value: [value]) if model.is_batch_data else (lambda value: value)
        floating: dict[str, Any] = {
            keys.POSITIONS: structure.positions,
            keys.CELL: structure.cell,
            keys.SHIFTS: structure.unit_shifts,
            keys.VOLUME: torch.linalg.det(structure.cell).abs(),
        }
        integral = {
            keys.EDGES: structure.edge_index,
            keys.FEATURES: structure.species,  # an embedding of atomic numbers comes before, or these are taken
            keys.NUMBERS: torch.tensor(known)[structure.species],
            keys.NUM_ATOMS: torch.tensor(num_atoms),
            keys.BATCH: torch.zeros(num_atoms, dtype=torch.int64),
        }
        # Copies, because models write into what they get.
        inputs = _Data({name: tensor.to(device, dtype, copy=True) for name, tensor in floating.items()})
        inputs.update({name: tensor.to(device, copy=True) for name, tensor in integral.items()})
        names = list(modalities(model).items())
        if names:
            inputs[keys.MODALITY] = several(names[head][0])
            inputs[keys.MODAL_TYPE] = torch.tensor(several(names[head][1]), device=device)
        if model.is_batch_data:
            for name in (keys.NUM_ATOMS, keys.VOLUME):
                inputs[name] = inputs[name][None]
        inputs[keys.EDGE_VECTORS] = _edge_vectors(inputs)
        return inputs

    def run(
        self, model: torch.nn.Module, structure: Structure, head: int = 0, training: bool = False
    ) -> tuple[Outputs, Tensor]:
        """See `ModelKind.run`; forces that the model leaves to others are added."""
        inputs = self.inputs(model, structure, head)
        positions = inputs[keys.POSITIONS].requires_grad_()
        inputs[keys.EDGE_VECTORS] = _edge_vectors(inputs)
        with training_mode(model) if training else contextlib.nullcontext(), one_hot_in(model, self.dtype(model)):
            found = model(inputs)
            energy = found[keys.ENERGY].reshape(-1)
            if keys.FORCES not in found:
                found[keys.FORCES] = -torch.autograd.grad(energy.sum(), positions, create_graph=model.training)[0]
        outputs = {
            "energy": energy,
            "node_energy": found[keys.ENERGIES].reshape(-1),
            "forces": found[keys.FORCES],
        }
        if keys.STRESS in found:
            outputs["stress"] = -found[keys.STRESS].reshape(6)[torch.tensor(_VOIGT)]
        if keys.ATOMIC_VIRIALS in found:
            outputs["atomic_virials"] = found[keys.ATOMIC_VIRIALS]
        return outputs, positions


class _Data(dict[str, Any]):
    """The data of one structure; SevenNet asks for the features as an attribute too."""

    @property
    def x(self) -> Tensor:
        tensor: Tensor = self[keys.FEATURES]
        return tensor


def _edge_vectors(inputs: Mapping[str, Any]) -> Tensor:
    receivers, senders = inputs[keys.EDGES]
    positions: Tensor = inputs[keys.POSITIONS]
    return positions[senders] - positions[receivers] + inputs[keys.SHIFTS] @ inputs[keys.CELL]

"""How NequIP models are called in a step of training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from eqaccel.patches.batch import Batch, Extent, Field, Per, blank_edges, blank_positions
from eqaccel.patches.kind import Training, class_names
from eqaccel.patches.nequip.swapping import NequipConvolution


class NequipTraining(Training):
    """NequIP's models in training mode: `model(data)`."""

    receiver_row = NequipConvolution.receiver_row
    gives_inputs = True
    fields: Mapping[str, Field] = MappingProxyType(
        {
            "pos": Field("nodes"),
            "atom_types": Field("nodes"),
            "batch": Field("nodes"),
            "edge_index": Field("edges", dim=1),
            "edge_cell_shift": Field("edges"),
            "cell": Field("structures"),
            "num_atoms": Field("structures"),
        }
    )
    outputs: Mapping[str, Per] = MappingProxyType(
        {
            "total_energy": "structures",
            "atomic_energy": "nodes",
            "forces": "nodes",
            "virial": "structures",
            "stress": "structures",
        }
    )

    def obstacle(self, model: Any) -> str:
        """Models that are no plain graph model call others in ways of their own."""
        if class_names(model) & {"CompileGraphModel"} or "GraphModel" not in class_names(model):
            return f"{type(model).__name__} is no plain GraphModel"
        return ""

    def batch(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Batch | str | None:
        """See `Training.batch`."""
        if not model.training or len(args) != 1 or kwargs:
            return None
        data = {name: value for name, value in args[0].items() if name in model.model_input_fields}
        others = [name for name in data if name not in self.fields]
        if others or "num_atoms" not in data or "batch" not in data:
            return f"its input has {', '.join(others)}" if others else "its input is no batch"
        if "cell" in data:
            data["cell"] = data["cell"].view(-1, 3, 3)
        extent = Extent(len(data["pos"]), data["edge_index"].size(1), len(data["num_atoms"]))
        return self.read(data, {}, extent)

    def blank(self, model: Any, batch: Batch, room: Extent) -> dict[str, Tensor]:
        """See `Training.blank`."""
        like, blank = batch.inputs, self.zeros(batch, room)
        blank["pos"] = blank_positions(room.nodes, float(model.metadata["r_max"]), like["pos"])
        blank["batch"].fill_(room.structures - 1)
        blank["edge_index"] = blank_edges(room, like["edge_index"])
        blank["num_atoms"].fill_(1)
        if "cell" in blank:
            blank["cell"].copy_(torch.eye(3).expand_as(blank["cell"]))
        return blank

    def call(
        self, forward: Callable[..., Mapping[str, Any]], inputs: dict[str, Tensor], options: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """See `Training.call`."""
        return forward(inputs)

"""How MACE models are called in a step of training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from eqaccel.patches.batch import Batch, Extent, Field, Per, blank_edges, blank_positions
from eqaccel.patches.kind import Training, class_names
from eqaccel.patches.mace.swapping import LONG_RANGE, MaceConvolution

_RECORDED = frozenset({"training", "compute_force", "compute_virials", "compute_stress", "compute_displacement"})
"""Arguments of a model's forward that a recording may have been made with; others must be off."""


class MaceTraining(Training):
    """MACE's models of energies: `model(batch.to_dict(), training=True, compute_force=True, ...)`."""

    receiver_row = MaceConvolution.receiver_row
    fields: Mapping[str, Field] = MappingProxyType(
        {
            "positions": Field("nodes"),
            "node_attrs": Field("nodes"),
            "batch": Field("nodes"),
            "edge_index": Field("edges", dim=1),
            "shifts": Field("edges"),
            "unit_shifts": Field("edges"),
            "cell": Field("structures", rows=3),
            "ptr": Field("structures", more=1),
            "head": Field("structures"),
        }
    )
    outputs: Mapping[str, Per] = MappingProxyType(
        {
            "energy": "structures",
            "interaction_energy": "structures",
            "node_energy": "nodes",
            "forces": "nodes",
            "virials": "structures",
            "stress": "structures",
            "node_feats": "nodes",
        }
    )

    def obstacle(self, model: Any) -> str:
        """Models with long-range parts, or that read more than a structure, are called in ways of their own."""
        kinds = class_names(model)
        if not kinds & {"MACE"} or kinds & LONG_RANGE:
            return f"{type(model).__name__} is no MACE whose energy is a sum over atoms alone"
        return "it embeds more than the types of atoms" if hasattr(model, "joint_embedding") else ""

    def batch(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Batch | str | None:
        """See `Training.batch`."""
        if not kwargs.get("training", args[1] if len(args) > 1 else False):
            return None
        others = [name for name, value in kwargs.items() if name not in _RECORDED and name != "data" and value]
        if others or len(args) + ("data" in kwargs) != 1:
            return f"it is called with {', '.join(others) or 'positional arguments'}"
        data = args[0] if args else kwargs["data"]
        if "displacement" in data:
            return "it is called with a displacement"
        extent = Extent(len(data["positions"]), data["edge_index"].size(1), len(data["ptr"]) - 1)
        options = {name: bool(value) for name, value in kwargs.items() if name in _RECORDED}
        return self.read(data, options, extent)

    def blank(self, model: Any, batch: Batch, room: Extent) -> dict[str, Tensor]:
        """See `Training.blank`."""
        like, blank = batch.inputs, self.zeros(batch, room)
        blank["positions"] = blank_positions(room.nodes, float(model.r_max), like["positions"])
        blank["node_attrs"][:, 0] = 1
        blank["batch"].fill_(room.structures - 1)
        blank["edge_index"] = blank_edges(room, like["edge_index"])
        blank["ptr"].fill_(room.nodes)
        blank["cell"].copy_(torch.eye(3).repeat(room.structures, 1))
        return blank

    def call(
        self, forward: Callable[..., Mapping[str, Any]], inputs: dict[str, Tensor], options: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """See `Training.call`."""
        return forward(inputs, **options)

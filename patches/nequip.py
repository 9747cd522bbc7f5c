"""NequIP models: which of their modules eqaccel replaces, and how to run one on a structure.

Every NequIP interaction block gathers, multiplies and scatters in one module, its `TensorProductScatter`, which is
replaced; so are the node-wise modules around it (`eqaccel.patches.nodes`). A packaged model brings renamed copies of
nequip and e3nn, so modules are told by their class names (`class_names`), whatever package these classes are from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from eqaccel.patches.convolution import build_convolution, check_product, convolution_row, rebuilt_convolution
from eqaccel.patches.core import Row, Swap, class_names, refuse_patched
from eqaccel.patches.nodes import node_rows, node_swaps
from eqaccel.patches.radial import radial_rows, radial_swaps
from eqaccel.patches.replacement import Replacement
from eqaccel.patches.structures import Structure
from eqaccel.patches.torch_state import model_device, training_mode

from eqaccel.errors import AlreadyPatchedError, PatchError
from eqaccel.ops.graph import packed_rows

_SCATTER = "TensorProductScatter"
_OTHER_ACCELERATORS: Mapping[str, str] = MappingProxyType(
    {
        "OpenEquivarianceTensorProductScatter": "OpenEquivariance",
        "CuEquivarianceTensorProductScatter": "cuEquivariance",
    }
)
_ALLEGRO = "Contracter"
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
"""The outputs that are verified, and their names in NequIP."""


class NequipConvolution(Replacement):
    """The `TensorProductScatter` of an interaction block."""

    _nequip_custom_ops_libs = ("eqaccel.ops",)  # nequip-compile writes it into the .pt2, whose loader imports it

    def forward(
        self,
        x: torch.Tensor,
        edge_attr: torch.Tensor,
        edge_weight: torch.Tensor,
        edge_dst: torch.Tensor,
        edge_src: torch.Tensor,
    ) -> torch.Tensor:
        """Computes the messages summed over the edges of each receiver.

        Args:
            x: (num_nodes, feature_irreps_in.dim).
            edge_attr: (num_edges, irreps_edge_attr.dim).
            edge_weight: (num_edges, weight_numel).
            edge_dst: (num_edges,), the receivers: row 0 of NequIP's edge index.
            edge_src: (num_edges,), the senders: row 1.

        Returns:
            (num_nodes, irreps_mid.dim)
        """
        num_nodes = x.size(0)
        if torch.jit.is_scripting():
            index = torch.ops.eqaccel.graph(edge_dst, edge_src, num_nodes, num_nodes)
        else:
            index = packed_rows(edge_dst, edge_src, num_nodes, num_nodes)
        return self.eqaccel(x, edge_attr, edge_weight, index, num_nodes)

    def remake(self) -> torch.nn.Module:
        """See `Replacement`."""
        return rebuilt_convolution(self.tp, self.eqaccel)


class NequipFamily:
    """The models of nequip, built in code, from a checkpoint or from a package; implements `ModelFamily`."""

    name = "NequIP"
    ranks: Mapping[str, int] = MappingProxyType({"energy": 0, "node_energy": 0, "forces": 1, "virials": 2, "stress": 2})

    def recognises(self, model: torch.nn.Module) -> bool:
        """Whether the model is what every model of the NequIP framework is wrapped in, Allegro's too."""
        return bool(class_names(model) & {"GraphModel", "DictInputOutputWrapper"})

    def swaps(self, model: torch.nn.Module, deterministic: bool) -> list[Swap]:
        """Checks every layer, then builds the convolution of each; the model is not changed.

        Raises:
            AlreadyPatchedError: If the model is accelerated already.
            PatchError: If it is another kind of model, or a layer cannot be accelerated.
        """
        refuse_patched(model)
        scatters = list(_scatters(model))
        if not scatters:
            raise PatchError(f"model: {_nothing_to_replace(model)}")
        for path, _, scatter in scatters:
            _check(path, scatter)
        device = model_device(model)
        convolutions = [
            Swap(
                parent=parent,
                name=path.rpartition(".")[2],
                kind=NequipConvolution,
                added=build_convolution(f"{path}.tp", scatter.tp, deterministic, device),
            )
            for path, parent, scatter in scatters
        ]
        networks = [getattr(parent, "edge_mlp", None) for _, parent, _ in scatters]
        return [*convolutions, *chain.from_iterable(map(radial_swaps, networks)), *node_swaps(model)]

    def rows(self, model: torch.nn.Module) -> list[Row]:
        """The convolutions and the costly modules of edges layer by layer, then the node-wise modules."""
        rows = []
        for path, parent, scatter in _scatters(model):
            product = getattr(scatter, "tp", None)
            rows.append(convolution_row(path, scatter, product, partial(_check, path, scatter)))
            rows += radial_rows(f"{path.rpartition('.')[0]}.edge_mlp", model, getattr(parent, "edge_mlp", None))
        if rows:
            rows += node_rows(model)
        else:
            rows.append(Row("", type(model).__name__, False, f"left: {_nothing_to_replace(model)}"))
        return rows

    def extent(self, model: torch.nn.Module) -> tuple[float, int]:
        """The cutoff, and the number of atom types."""
        return float(model.metadata["r_max"]), len(model.type_names)

    def evaluate(self, model: torch.nn.Module, structure: Structure) -> dict[str, torch.Tensor]:
        """Runs the model for everything it predicts; forces that it leaves to others are added."""
        outputs, _ = _run(model, structure)
        return {name: output.detach().to("cpu", torch.float64) for name, output in outputs.items()}

    def train(self, model: torch.nn.Module, structure: Structure) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Runs the model in training mode, in which it keeps what derivatives of forces take."""
        with training_mode(model):
            return _run(model, structure)


def _run(model: torch.nn.Module, structure: Structure) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    inputs = model_inputs(model, structure)
    positions = inputs["pos"].requires_grad_()
    outputs = model(inputs)
    if "forces" not in outputs:
        energy = outputs["total_energy"].sum()
        outputs["forces"] = -torch.autograd.grad(energy, positions, create_graph=model.training)[0]
    found = {name: outputs.get(field) for name, field in _OUTPUTS.items()}
    return {name: output for name, output in found.items() if isinstance(output, torch.Tensor)}, positions


def _scatters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, Any]]:
    """The scatters of a model, replaced or not: path, owner, and module."""
    for prefix, parent in model.named_modules():
        for name, scatter in parent.named_children():
            if _SCATTER in class_names(scatter):
                yield f"{prefix}.{name}".lstrip("."), parent, scatter


def _check(path: str, scatter: Any) -> None:
    """Refuses a layer that eqaccel cannot accelerate; says what is wrong with it and what to do."""
    for kind in class_names(scatter) & _OTHER_ACCELERATORS.keys():
        raise AlreadyPatchedError(
            f"{path}: {_OTHER_ACCELERATORS[kind]} accelerates this model already; load it again, without the modifier "
            f"that enables it"
        )
    owner = next(cls.__name__ for cls in type(scatter).__mro__ if "forward" in vars(cls))
    if owner != _SCATTER:
        raise PatchError(
            f"{path}: expected the forward method of nequip's {_SCATTER}, got that of {owner}; use the model unpatched"
        )
    check_product(f"{path}.tp", getattr(scatter, "tp", None))


def _nothing_to_replace(model: torch.nn.Module) -> str:
    """Why a model of the framework has no layer that eqaccel could replace, and what to do."""
    if "DictInputOutputWrapper" in class_names(model):
        return (
            "nequip-compile has compiled this model, so that it cannot be changed; patch the model it was made from, "
            "or compile it again with `nequip-compile --modifiers enable_eqaccel`"
        )
    if any(_ALLEGRO in class_names(module) for module in model.modules()):
        return (
            f"{type(model).__name__} is an Allegro model, which has no convolution over node features: its "
            f"{_ALLEGRO} multiplies features of edges in a layout of its own, and eqaccel has no kernel for that; use "
            f"it unpatched, or with Allegro's own modifiers"
        )
    return f"{type(model).__name__} has no {_SCATTER}, so there is nothing to replace"


def model_inputs(model: torch.nn.Module, structure: Structure) -> dict[str, Any]:
    """The dictionary that `nequip.data.from_ase` and a neighbour list would give for one structure.

    NequIP takes float64 whatever it computes in. An edge starts at its receiver; since the list holds every pair in
    both directions, it needs no turning around.
    """
    inputs = {
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


class _NoGhosts:
    """Stands in for LAMMPS where a model prepared for ML-IAP asks for the features of ghosts, and there are none."""

    def __init__(self, num_atoms: int) -> None:
        self.nlocal = self.ntotal = num_atoms

    def forward_exchange(self, features: torch.Tensor, out: torch.Tensor, _width: int) -> None:
        """What every local atom has is what there is."""
        out.copy_(features)

    reverse_exchange = forward_exchange

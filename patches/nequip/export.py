"""NequIP models as exported potentials.

The network of the model runs as it is: NequIP's modules accept edge vectors in place of positions, and each layer calls
a module for the exchange of ghosts, which does nothing until it is replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Dict  # noqa: UP035 (TorchScript)

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from eqaccel.errors import ExportError
from eqaccel.ops import EdgeWeights
from eqaccel.patches.kind import Exporting, check_own_methods, check_replaced, class_names
from eqaccel.patches.potential import Convolution, PiecewiseConvolution, Potential
from eqaccel.patches.radial import DeferredNetwork, FirstLayers, last_layer
from eqaccel.patches.sums import add_in_order

_SUM = ("atomic_energy", "total_energy", "sum", 1.0)
"""What the total energy is made of, into which field, and how."""


class ExportedConvolution(Convolution):
    """The convolution of an interaction block."""

    def forward(self, x: Tensor, edge_attr: Tensor, edge_weight: Tensor, edge_dst: Tensor, edge_src: Tensor) -> Tensor:
        """As a block calls it: `edge_dst` (num_edges,) are the receivers, `edge_src` the senders."""
        return self.convolve(x, edge_attr, edge_weight, edge_dst, edge_src)


class DeferredConvolution(PiecewiseConvolution):
    """The convolution of an interaction block whose weights are to be made yet."""

    def forward(
        self, x: Tensor, edge_attr: Tensor, edge_weight: EdgeWeights, edge_dst: Tensor, edge_src: Tensor
    ) -> Tensor:
        """As a block calls it: `edge_dst` (num_edges,) are the receivers, `edge_src` the senders."""
        return self.convolve(x, edge_attr, edge_weight, edge_dst, edge_src)


class WholeSlices(TorchFunctionMode):
    """Gives back a tensor where a slice takes all of it.

    Layers take the rows of local nodes. A step has no ghosts, and torch would write the gradient of such a slice into
    zeros, of all the features and messages of a layer.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function of torch's, unless it is such a slice."""
        if func is Tensor.__getitem__ and _takes_all(*args):
            return args[0]
        return func(*args, **(kwargs or {}))


def _takes_all(tensor: Tensor, index: Any) -> bool:
    if type(index) is not slice or tensor.dim() == 0 or index.start is not None or index.step is not None:
        return False
    return index.stop is None or (type(index.stop) is int and index.stop >= tensor.size(0))


class WithoutGhosts(nn.Module):
    """The network of a step, whose nodes are all local.

    Args:
        network: The network.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, data: Dict[str, Tensor]) -> Dict[str, Tensor]:  # noqa: UP006 (as the network has it)
        """As the network."""
        with WholeSlices():
            result: dict[str, Tensor] = self.network(data)
            return result


class GhostExchange(nn.Module):
    """Stands in for NequIP's `NoOpGhostExchangeModule`; the handle passes through the network among the data."""

    def forward(self, data: Dict[str, Tensor], ghost_included: bool) -> Dict[str, Tensor]:  # noqa: UP006 (TorchScript)
        """Extends the features of local nodes by those of ghosts."""
        handle = int(data["eqaccel_exchange"].item())
        features = data["node_features"]
        data["node_features"] = torch.ops.eqaccel.exchange(features, handle, data["atom_types"].size(0))
        return data


class NequipPotential(Potential):
    """A NequIP energy model with patched layers.

    Args:
        model: A copy of the `GraphModel`, whose modules are taken over.
        constants: See `Potential`.
    """

    def __init__(self, model: Any, constants: Tensor) -> None:
        blocks = [block for _, block in _blocks(model)]
        super().__init__(model.model_dtype, [block.linear_1.irreps_out.dim for block in blocks[1:]], constants)
        self.network = getattr(model.model, "func", model.model)
        add_in_order(self.network, "scatter")  # potentials of pairs

    def make_piecewise(self) -> None:
        """See `Potential.make_piecewise`."""
        for _, block in _blocks(self.network):
            network = getattr(block.edge_mlp, "mlp", block.edge_mlp)  # which older versions have in one
            block.edge_mlp = DeferredNetwork(network, of_lengths=True)
            block.tp_scatter = DeferredConvolution(block.tp_scatter.eqaccel)
        self.network = WithoutGhosts(self.network)

    def make_scriptable(self) -> None:
        """See `Potential.make_scriptable`."""
        for _, block in _blocks(self.network):
            network = getattr(block.edge_mlp, "mlp", block.edge_mlp)
            last = last_layer(network)
            block.tp_scatter = ExportedConvolution(block.tp_scatter.eqaccel, last)
            if last is not None:
                block.edge_mlp = FirstLayers(network, of_lengths=True)
            block.ghost_exchange = GhostExchange()

    def node_energies(
        self, vectors: Tensor, edge_index: Tensor, types: Tensor, num_local: int, exchange: int
    ) -> Tensor:
        """See `Potential.node_energies`."""
        # NequIP measures distances in float64, from the receiver, and counts the atoms by their positions.
        data = {
            "pos": vectors.new_zeros([num_local, 3], dtype=torch.float64),
            "atom_types": types,
            "edge_index": edge_index.flip(0),
            "edge_vectors": -vectors.to(torch.float64),
            "eqaccel_exchange": torch.tensor([exchange]),
        }
        return self.network(data)["atomic_energy"].reshape(-1)


class NequipExporting(Exporting):
    """The energy models of nequip as potentials."""

    def accepts(self, model: nn.Module) -> bool:
        """Whether the model is a `GraphModel`, of a package too, with NequIP's layers."""
        return "GraphModel" in class_names(model) and any(True for _ in _blocks(model))

    def check(self, model: Any) -> None:
        """See `Exporting.check`."""
        for path, block in _blocks(model):
            check_replaced(f"{path}.tp_scatter", block.tp_scatter)
        _check_around(model)
        for path, module in model.named_modules():
            fields = getattr(module, "categorical_graph_field_embed_shifts", None)
            if fields:
                raise ExportError(
                    f"model: expected a model whose energy depends on the structure alone, but {path} takes "
                    f"{', '.join(fields)}; use it from Python"
                )

    def type_names(self, model: Any) -> list[str]:
        """See `Exporting.type_names`."""
        return list(model.type_names)

    def constants(self, model: Any, head: int) -> Tensor:
        """See `Exporting.constants`; NequIP's network adds them itself, in float64 whatever the model's dtype is."""
        return torch.zeros(len(model.type_names))

    def potential(self, model: Any, head: int, constants: Tensor) -> Potential:
        """See `Exporting.potential`."""
        return NequipPotential(model, constants)

    def move(self, model: Any, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """See `Exporting.move`."""
        if dtype != model.model_dtype:
            raise ExportError(
                f"dtype: NequIP models keep the type that they were built in, expected {model.model_dtype}, got "
                f"{dtype}; leave dtype out, or build the model with another model_dtype"
            )
        return model.to(device)


def _check_around(model: Any) -> None:
    """Raises `ExportError` unless all that a model does with the energies of atoms is to add and differentiate them."""
    check_own_methods("the model", model, "nequip", {"CompileGraphModel", "GraphModel"})
    if hasattr(model.model, "func"):
        check_own_methods("model.model", model.model, "nequip", {"ForceStressOutput", "PartialForceOutput"})
    network = getattr(model.model, "func", model.model)
    check_own_methods("the energy model", network, "nequip", {"SequentialGraphNetwork"})
    name, total = list(network.named_children())[-1]
    check_own_methods(f"{name}, its last module,", total, "nequip", {"AtomwiseReduce"})
    found = (total.field, total.out_field, total.reduce, total.constant)
    if found != _SUM:
        raise ExportError(
            f"model: expected {name} to add up the energies of atoms, {_SUM} of field, out_field, reduce and constant, "
            f"got {found}; use the model from Python"
        )


def _blocks(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        if "InteractionBlock" in class_names(module) and hasattr(module, "tp_scatter"):
            yield path, module

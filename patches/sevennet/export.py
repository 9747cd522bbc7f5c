"""SevenNet models as exported potentials.

The modules of the model run as they are, in their order, on edge vectors. Left out are those before and after the
network: what embeds elements and modalities, scales energies, adds them up and differentiates them, which a potential
does itself. Convolutions take features of ghosts from their owners, and give those of local nodes alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Dict  # noqa: UP035 (TorchScript)

import torch
from torch import Tensor, nn

from eqaccel.errors import ExportError
from eqaccel.ops import EdgeWeights
from eqaccel.patches.elements import SYMBOLS
from eqaccel.patches.kind import Exporting, check_own_methods, check_replaced
from eqaccel.patches.potential import Convolution, PiecewiseConvolution, Potential
from eqaccel.patches.radial import DeferredNetwork, FirstLayers, last_layer
from eqaccel.patches.sevennet import keys
from eqaccel.patches.sevennet.parts import atomic_numbers, convolutions, modalities
from eqaccel.prepare import model_dtype

_NETWORK = frozenset(
    {
        "EdgeEmbedding",
        "EquivariantGate",
        "FCN_e3nn",
        "IrrepsConvolution",
        "IrrepsLinear",
        "SelfConnectionIntro",
        "SelfConnectionLinearIntro",
        "SelfConnectionOutro",
    }
)
"""Classes of the modules that a potential runs."""

_SCALES = frozenset({"ModalWiseRescale", "Rescale", "SpeciesWiseRescale"})

_AROUND = _SCALES | {
    "AtomReduce",
    "EdgePreprocess",
    "ForceOutput",
    "ForceStressOutput",
    "ForceStressOutputFromEdge",
    "OnehotEmbedding",
    "_ModalInputPrepare",
}
"""Classes of the modules in whose place a potential has something of its own."""


_READS: Mapping[str, str] = MappingProxyType(
    {
        "key_x": keys.FEATURES,
        "key_filter": keys.EDGE_ATTRIBUTES,
        "key_weight_input": keys.EDGE_EMBEDDING,
        "key_edge_idx": keys.EDGES,
    }
)
"""What a convolution reads, by the attributes that say so."""


class ExportedConvolution(Convolution):
    """The convolution of a layer."""

    def forward(self, x: Tensor, y: Tensor, weight: Tensor, receiver: Tensor, sender: Tensor) -> Tensor:
        """As a `Layer` calls it."""
        return self.convolve(x, y, weight, receiver, sender)


class DeferredConvolution(PiecewiseConvolution):
    """The convolution of a layer whose weights are to be made yet."""

    def forward(self, x: Tensor, y: Tensor, weight: EdgeWeights, receiver: Tensor, sender: Tensor) -> Tensor:
        """As a `Layer` calls it."""
        return self.convolve(x, y, weight, receiver, sender)


class Layer(nn.Module):
    """An `IrrepsConvolution`, with the exchange of ghosts before it.

    Args:
        convolution: The module to stand in for, a replacement.
        is_first: Whether features of ghosts are there already, because they follow from their elements.
    """

    def __init__(self, convolution: Any, is_first: bool) -> None:
        super().__init__()
        self.weight_nn = convolution.weight_nn
        self.convolution = convolution.eqaccel
        self.denominator = convolution.denominator
        self.is_first = is_first

    def forward(self, data: Dict[str, Tensor]) -> Dict[str, Tensor]:  # noqa: UP006 (TorchScript)
        """Puts the messages of local nodes in place of the features."""
        x = data[keys.FEATURES]
        num_local, num_nodes = data[keys.NODE_ATTRIBUTES].size(0), data[keys.TYPES].size(0)
        if not self.is_first:
            x = torch.ops.eqaccel.exchange(x, int(data[keys.EXCHANGE].item()), num_nodes)
        edges = data[keys.EDGES]
        weight = self.weight_nn(data[keys.EDGE_EMBEDDING])
        messages = self.convolution(x, data[keys.EDGE_ATTRIBUTES], weight, edges[0], edges[1])
        if num_local < num_nodes:
            messages = messages[:num_local]
        data[keys.FEATURES] = messages / self.denominator
        return data


class LocalSelfConnection(nn.Module):
    """The self-connection of the first layer, of local nodes alone.

    Args:
        module: The module that does it for all.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, data: Dict[str, Tensor]) -> Dict[str, Tensor]:  # noqa: UP006 (TorchScript)
        """Leaves the features of all nodes as they are."""
        x = data[keys.FEATURES]
        data[keys.FEATURES] = x[: data[keys.NODE_ATTRIBUTES].size(0)]
        data = self.module(data)
        data[keys.FEATURES] = x
        return data


class SevennetPotential(Potential):
    """A SevenNet model with patched layers, for one modality.

    Args:
        model: A copy of the model, whose modules are taken over.
        modality: Index of the modality; 0 if the model has none.
        constants: See `Potential`.
    """

    if TYPE_CHECKING:  # buffers
        one_hot: Tensor
        modality: Tensor
        scale: Tensor

    def __init__(self, model: Any, modality: int, constants: Tensor) -> None:
        layers = [convolution for _, _, convolution in convolutions(model)]
        widths = [convolution.convolution.irreps_in1.dim for convolution in layers[1:]]
        super().__init__(model_dtype(model), widths, constants)
        model.set_is_batch_data(False)
        self.network = nn.ModuleList()
        for module in model.children():
            name = type(module).__name__
            if name == "IrrepsConvolution":
                self.network.append(Layer(module, module is layers[0]))
            elif name.startswith("SelfConnection") and name.endswith("Intro") and not self._has_layer():
                self.network.append(LocalSelfConnection(module))
            elif name in _NETWORK:
                self.network.append(module)
            if name == "EdgeEmbedding":
                _keep_coefficients(module.basis_function)
        like = next(model.parameters())
        self.register_buffer("one_hot", torch.eye(len(model.type_map)).to(like))
        self.register_buffer("modality", torch.eye(max(1, len(model.modal_map or ())))[modality].to(like))
        self.register_buffer("scale", _of_types(model, "scale", modality).to(like))

    def _has_layer(self) -> bool:
        return any(isinstance(module, Layer) for module in self.network)

    def make_piecewise(self) -> None:
        """See `Potential.make_piecewise`."""
        for layer in self.network:
            if isinstance(layer, Layer):
                layer.weight_nn = DeferredNetwork(layer.weight_nn, of_lengths=True)
                layer.convolution = DeferredConvolution(layer.convolution)

    def make_scriptable(self) -> None:
        """See `Potential.make_scriptable`."""
        for layer in self.network:
            if isinstance(layer, Layer):
                last = last_layer(layer.weight_nn)
                layer.convolution = ExportedConvolution(layer.convolution, last)
                if last is not None:
                    layer.weight_nn = FirstLayers(layer.weight_nn, of_lengths=True)

    def node_energies(
        self, vectors: Tensor, edge_index: Tensor, types: Tensor, num_local: int, exchange: int
    ) -> Tensor:
        """See `Potential.node_energies`."""
        local = types if num_local == types.size(0) else types[:num_local]
        data: Dict[str, Tensor] = {  # noqa: UP006 (TorchScript)
            # SevenNet's edges start at their receivers.
            keys.EDGE_VECTORS: -vectors,
            keys.EDGES: edge_index.flip(0),
            keys.FEATURES: self.one_hot.index_select(0, types),
            keys.NODE_ATTRIBUTES: self.one_hot.index_select(0, local),
            keys.MODAL_ATTRIBUTES: self.modality,
            keys.TYPES: types,
            keys.EXCHANGE: torch.tensor([exchange]),
        }
        for module in self.network:
            data = module(data)
        return data[keys.UNSCALED_ENERGIES].reshape(-1) * self.scale.index_select(0, local)


class SevennetExporting(Exporting):
    """The models of sevenn as potentials."""

    def accepts(self, model: nn.Module) -> bool:
        """Whether the model has layers of SevenNet's."""
        return any(True for _ in convolutions(model))

    def check(self, model: Any) -> None:
        """See `Exporting.check`."""
        for path, _, convolution in convolutions(model):
            check_replaced(path, convolution)
        check_own_methods("the model", model, "sevenn", {"AtomGraphSequential"})
        for name, module in model.named_children():
            known = type(module).__name__
            if known not in _NETWORK | _AROUND:
                raise ExportError(
                    f"model: expected modules of SevenNet's own classes, got {name} = {known}; use the model from "
                    f"Python"
                )
            check_own_methods(name, module, "sevenn", {known})
        rescale, total = _one(model, _SCALES), _one(model, {"AtomReduce"})
        reads = [(module, name) for _, _, module in convolutions(model) for name in _READS]
        if any(getattr(module, name) != _READS[name] for module, name in reads):
            raise ExportError("model: expected layers that read what SevenNet's do, got others; use it from Python")
        if not model.type_map or sorted(model.type_map.values()) != list(range(len(model.type_map))):
            raise ExportError(
                "model: expected a type_map, the index of each atomic number, which this model lacks; set it"
            )
        is_scaled = rescale is not None and _fields(rescale) == (keys.UNSCALED_ENERGIES, keys.ENERGIES)
        is_summed = total is None or (_fields(total) == (keys.ENERGIES, keys.ENERGY) and total.constant == 1.0)
        if not is_scaled or not is_summed:
            raise ExportError(
                "model: expected energies that are scaled per atom and summed, got a model that does something else; "
                "use it from Python"
            )

    def heads(self, model: Any) -> list[str]:
        """The modalities of the model."""
        return list(modalities(model)) or super().heads(model)

    def type_names(self, model: Any) -> list[str]:
        """The chemical symbols of the model's elements."""
        return [SYMBOLS[number] for number in atomic_numbers(model)]

    def constants(self, model: Any, head: int) -> Tensor:
        """See `Exporting.constants`."""
        return _of_types(model, "shift", _modality(model, head))

    def potential(self, model: Any, head: int, constants: Tensor) -> Potential:
        """See `Exporting.potential`."""
        return SevennetPotential(model, _modality(model, head), constants)


def _modality(model: Any, head: int) -> int:
    return list(modalities(model).values() or [0])[head]


def _one(model: nn.Module, names: frozenset[str] | set[str]) -> Any:
    return next((module for module in model.children() if type(module).__name__ in names), None)


def _fields(module: Any) -> tuple[str, str]:
    """What a module reads, and what it writes."""
    return module.key_input, module.key_output


def _of_types(model: Any, name: str, modality: int) -> Tensor:
    """What each type of atom is scaled by, or shifted by, (num_types,)."""
    rescale = _one(model, _SCALES)
    values: Tensor = getattr(rescale, name).detach()
    if getattr(rescale, f"use_modal_wise_{name}", False):
        values = values[modality]
    return values.expand(len(model.type_map))


def _keep_coefficients(basis: Any) -> None:
    """Makes coefficients that are not trained a buffer, which goes where the model goes."""
    coefficients = basis.coeffs
    if not isinstance(coefficients, nn.Parameter):
        del basis.coeffs
        basis.register_buffer("coeffs", coefficients)

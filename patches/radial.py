"""The radial networks, which make the weights of edges: their layers with eqaccel's matrix product and activation.

These products take as long as the convolutions they are for, or longer. Only layers of the known kinds are replaced,
and activations that are SiLU; the rest of a network, such as normalisations, stays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from eqaccel.errors import SpecError
from eqaccel.families.matrix_product import Factors, MatrixProductSpec
from eqaccel.families.radial_layer import RadialLayerSpec
from eqaccel.families.radial_network import RadialNetworkSpec
from eqaccel.families.silu import SiluSpec
from eqaccel.ops import (
    EdgeWeights,
    LastProduct,
    MatrixProduct,
    RadialLayer,
    RadialNetwork,
    ScaledSilu,
    depend_on_lengths,
    has_matrix_kernel,
)
from eqaccel.patches.kind import class_names
from eqaccel.patches.replacement import Replacement, Swap, plain_class
from eqaccel.patches.report import ReportRow
from eqaccel.patches.torch_state import model_device
from eqaccel.prepare import model_dtype

_CAPABILITIES = {
    Factors.SPLIT: "8.0 and 9.0 alone, where torch is not allowed TensorFloat-32",
    Factors.ROUNDED: "8.0, 8.6, 8.9, 9.0 and 12.0 alone",
}


class RadialPart(Replacement):
    """A layer whose matrix product or activation is eqaccel's, on the devices that this has a form for.

    Attributes:
        activates: Whether it has an activation of eqaccel's.
    """

    activates: ClassVar[bool] = False

    def forward(self, x: Tensor) -> Tensor:
        """Maps (num_edges, inputs) to (num_edges, outputs)."""
        if x.dim() == 2 and (x.is_cuda or x.is_cpu):
            return self.dense(x)
        return self.plain_forward(x)

    def multiplies_alone(self) -> bool:
        """Whether all that the layer does with rows is to multiply them by its `factors`."""
        return False

    @staticmethod
    def shape_of(layer: Any) -> tuple[int, int] | None:
        """Inputs and outputs of such a layer, if it has no bias."""
        return None

    def factors(self) -> Tensor:
        """What its product multiplies rows by, (inputs, outputs)."""
        raise NotImplementedError

    def remake(self) -> torch.nn.Module:
        """See `Replacement`; factors are read at every call."""
        return self.eqaccel


class RadialProduct(RadialPart):
    """A layer that is a product of matrices, and a bias or none."""

    def dense(self, x: Tensor) -> Tensor:
        """`forward` with eqaccel's product."""
        y = self.eqaccel(x, self.factors())
        return y if self.bias is None else y + self.bias

    def multiplies_alone(self) -> bool:
        """See `RadialPart.multiplies_alone`."""
        return self.bias is None


class RadialLinear(RadialProduct):
    """A `torch.nn.Linear` of a radial network."""

    def factors(self) -> Tensor:
        """See `RadialPart.factors`."""
        return self.weight.t()

    @staticmethod
    def shape_of(layer: Any) -> tuple[int, int] | None:
        """See `RadialPart.shape_of`."""
        return (layer.in_features, layer.out_features) if layer.bias is None else None


class RadialActivation(RadialPart):
    """A `torch.nn.SiLU` of a radial network."""

    activates = True

    def dense(self, x: Tensor) -> Tensor:
        """`forward` with eqaccel's activation."""
        return self.eqaccel(x)


class LayerNumbers(NamedTuple):
    """A layer without a bias, and its activation: factor * SiLU(scale * x w)."""

    inputs: int
    outputs: int
    factor: float = 1.0
    scale: float = 1.0


class Activating(torch.nn.Module):
    """What computes a layer that has an activation of eqaccel's.

    Args:
        numbers: Those of the layer that ends with the activation; None if it is no such layer.

    Attributes:
        numbers: As given.
        narrow: The kernel of this layer alone; None if there is none.
        network: The kernel of all layers up to this one; None if there is none, or one of more layers.
    """

    def __init__(self, numbers: LayerNumbers | None) -> None:
        super().__init__()
        self.numbers = numbers
        self.narrow = None if numbers is None else _kernel(RadialLayer, RadialLayerSpec, *numbers)
        self.network: RadialNetwork | None = None


class Activation(Activating):
    """What a `RadialActivation` computes with."""

    def __init__(self, numbers: LayerNumbers | None) -> None:
        super().__init__(numbers)
        self.silu = ScaledSilu(SiluSpec())

    def forward(self, x: Tensor) -> Tensor:
        """Of any shape."""
        return self.silu(x)


def _kernel(module: Callable[[Any], Any], spec: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return module(spec(*arguments))
    except SpecError:
        return None


class NarrowLayer(torch.nn.Module):
    """A layer and its activation in one kernel, which keeps nothing on the way, and no gradient of weights.

    Args:
        layer: The layer.
        kernel: What computes.
    """

    def __init__(self, layer: RadialPart, kernel: RadialLayer) -> None:
        super().__init__()
        self.layer, self.kernel = layer, kernel

    def forward(self, x: Tensor) -> Tensor:
        """Maps (rows, inputs) to (rows, outputs)."""
        return self.kernel(x, self.layer.factors())


class MergedLayers(torch.nn.Module):
    """Layers and their activations in one kernel, which keeps nothing on the way, and no gradient of weights.

    Args:
        layers: Those that have weights.
        kernel: What computes.
    """

    def __init__(self, layers: Sequence[RadialPart], kernel: RadialNetwork) -> None:
        super().__init__()
        self.layers, self.kernel = torch.nn.ModuleList(layers), kernel

    def forward(self, x: Tensor) -> Tensor:
        """Maps (rows, inputs) to (rows, outputs)."""
        weights = torch.cat([layer.factors().flatten() for layer in self.layers])  # type: ignore[operator]
        return self.kernel(x, weights)


def merged(layers: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Layers of a radial network whose weights are not trained: those are one that have a kernel together."""
    for layer in layers:
        if isinstance(layer, RadialPart):
            layer.update()
    network, together = _first_layers(layers)
    found: list[torch.nn.Module] = [] if network is None else [network]
    for layer in layers[together:]:
        kernel = layer.eqaccel.narrow if isinstance(layer, RadialPart) and layer.activates else None
        if kernel is None:
            found.append(layer)
        else:
            made_of = found.pop() if isinstance(layer, RadialActivation) else layer
            assert isinstance(made_of, RadialPart)
            found.append(NarrowLayer(made_of, kernel))
    return found


def _first_layers(layers: Sequence[Any]) -> tuple[MergedLayers | None, int]:
    """The layers from the first on that have a kernel together where their weights are, and how many they are."""
    numbers: list[LayerNumbers] = []
    weighted: list[RadialPart] = []
    for count, layer in enumerate(layers, 1):
        if not isinstance(layer, RadialPart):
            break
        if not isinstance(layer, RadialActivation):
            weighted.append(layer)
        if not layer.activates:
            continue
        numbers.append(layer.eqaccel.numbers)
        kernel = layer.eqaccel.network
        if None in numbers or len(weighted) != len(numbers):  # there is a bias, or a layer without an activation
            break
        # An activation may have been exchanged since the kernel was made.
        if kernel is None or _arguments(numbers) != (kernel.spec.widths, kernel.spec.factors, kernel.spec.scales):
            continue
        weight: Any = weighted[-1].weight
        if kernel.has_kernel(weight.device, weight.dtype):
            return MergedLayers(weighted, kernel), count
    return None, 0


def _arguments(numbers: Sequence[LayerNumbers]) -> tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...]]:
    """Those of the spec of layers one after another."""
    widths = (numbers[0].inputs, *(layer.outputs for layer in numbers))
    return widths, tuple(layer.factor for layer in numbers), tuple(layer.scale for layer in numbers)


def _give_network(activating: Sequence[Activating]) -> None:
    """Gives the last of the layers from the first on that have a kernel together that kernel."""
    numbers: list[LayerNumbers] = []
    best: tuple[Activating, RadialNetwork] | None = None
    for layer in activating:
        if layer.numbers is None or (numbers and numbers[-1].outputs != layer.numbers.inputs):
            break
        numbers.append(layer.numbers)
        kernel = _kernel(RadialNetwork, RadialNetworkSpec, *_arguments(numbers))
        best = best if kernel is None else (layer, kernel)
    if best is not None:
        best[0].network = best[1]


class DeferredNetwork(torch.nn.Module):
    """A radial network, as one that leaves the weights of edges to the convolution to be made.

    Args:
        network: The network.
        of_lengths: Whether its inputs are functions of lengths and of what does not move, see `depend_on_lengths`.
    """

    def __init__(self, network: torch.nn.Module, of_lengths: bool = False) -> None:
        super().__init__()
        self.network, self.of_lengths = network, of_lengths

    def forward(self, x: Tensor) -> EdgeWeights:
        """Maps (num_edges, inputs) to the weights that are to come."""
        if self.of_lengths:
            depend_on_lengths(x)
        last = _last_product(self.network)
        return EdgeWeights(self.network if last is None else last.weights, x, last=last)


class FirstLayers(torch.nn.Module):
    """A radial network without the product that it ends with, in a form that TorchScript reads.

    What it gives has a row for each edge, or fewer where a step shares them between an edge and its reverse.

    Args:
        network: The network, of which there is a `last_layer`.
        of_lengths: As for `DeferredNetwork`.
    """

    def __init__(self, network: Any, of_lengths: bool = False) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*merged(list(network)[:-1]))
        self.of_lengths = of_lengths

    def forward(self, x: Tensor) -> Tensor:
        """Maps (num_edges, inputs) to (rows, terms)."""
        if self.of_lengths:
            x = torch.ops.eqaccel.of_lengths(x)
        return self.layers(torch.ops.eqaccel.once_a_pair(x))


def last_layer(network: torch.nn.Module) -> RadialPart | None:
    """The end of a radial network, if that is a product alone."""
    last = network[-1] if isinstance(network, torch.nn.Sequential) and len(network) else None
    return last if isinstance(last, RadialPart) and last.multiplies_alone() else None


def _last_product(network: Any) -> LastProduct | None:
    last = last_layer(network)
    if last is None:
        return None
    first = merged(list(network)[:-1])
    keeps_inputs_alone = len(first) == 1 and isinstance(first[0], (NarrowLayer, MergedLayers))
    return LastProduct(functools.partial(_apply, first), last.eqaccel, last.factors(), keeps_inputs_alone)


def _apply(layers: Sequence[torch.nn.Module], x: Tensor) -> Tensor:
    return functools.reduce(lambda y, layer: layer(y), layers, x)


Form = tuple[type[RadialPart], torch.nn.Module]
"""What a layer becomes, and what that computes with."""


@dataclass(frozen=True)
class RadialForms:
    """How a kind of model has its radial networks.

    Attributes:
        networks: Names of their classes.
        layers: By the name of its class, what a layer becomes with products of a spec; None for one that is left. Those
            of torch's own classes need no mention.
    """

    networks: frozenset[str]
    layers: Mapping[str, Callable[[Any, MatrixProductSpec], Form | None]]


def radial_swaps(network: Any, forms: RadialForms, product: MatrixProductSpec | None = None) -> Iterator[Swap]:
    """The replacements of the layers of a network, with products of a spec; none if it is no known one."""
    product = MatrixProductSpec() if product is None else product
    if not class_names(network) & forms.networks:
        return
    for parent in network.modules():
        before: Any = None
        found: list[tuple[str, Form]] = []
        for name, layer in parent.named_children():
            form = _form(layer, before, forms, product)
            before = layer
            if form is not None:
                found.append((name, form))
        _give_network([form[1] for _, form in found if isinstance(form[1], Activating)])
        for name, form in found:
            yield Swap(parent, name, form[0], form[1].to(model_device(network)))


def radial_rows(path: str, model: torch.nn.Module, network: Any, forms: RadialForms) -> list[ReportRow]:
    """The line of a report about a network; none if it is no known one."""
    if not class_names(network) & forms.networks:
        return []
    layers = [module for module in network.modules() if isinstance(module, RadialPart)]
    device = model_device(model)
    products = [module.spec for module in network.modules() if isinstance(module, MatrixProduct)]
    spec = products[0] if products else MatrixProductSpec()
    no_kernel = (
        f"on a GPU, eqaccel.MatrixProduct has a kernel for float32 and compute capability {_CAPABILITIES[spec.factors]}"
    )
    of_factors = ", of rounded factors on GPUs," if spec.factors is Factors.ROUNDED else ","
    has_kernel = device.type == "cpu" or has_matrix_kernel(device, model_dtype(model), spec)
    activates = any(layer.activates for layer in layers)
    accelerated = bool(layers) and (has_kernel or activates)
    activations = "and its activations by eqaccel.ScaledSilu" if activates else "its activations left"
    together = _first_layers(layers)[0]
    if together is not None:
        activations += ", with their products by one eqaccel.RadialNetwork in steps and exported files"
    elif any(layer.activates and layer.eqaccel.narrow is not None for layer in layers):
        activations += ", the first with its product by eqaccel.RadialLayer in steps and exported files"
    if accelerated and has_kernel:
        note = f"its matrix products replaced by eqaccel.MatrixProduct{of_factors} {activations}"
    elif accelerated:
        note = f"its activations replaced by eqaccel.ScaledSilu, its matrix products left: {no_kernel}"
    elif layers:
        note = f"left as it was: {no_kernel}"
    elif next(radial_swaps(network, forms), None) is not None:
        note = "left: not patched yet, eqaccel.patch(model) replaces its matrix products and activations"
    else:
        note = "left: dense matrix products, which torch does well"
    return [ReportRow(path, type(network).__name__, accelerated, note, idle=bool(layers) and not accelerated)]


def _form(layer: Any, before: Any, forms: RadialForms, product: MatrixProductSpec) -> Form | None:
    own = plain_class(layer)
    if own is torch.nn.SiLU and not layer.inplace:
        form = None if before is None else _form(before, None, forms, product)
        shape = None if form is None else form[0].shape_of(before)
        return RadialActivation, Activation(None if shape is None else LayerNumbers(*shape))
    if own is torch.nn.Linear:
        return RadialLinear, MatrixProduct(product)
    read = forms.layers.get(own.__name__)
    return read(layer, product) if read else None

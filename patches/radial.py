"""The radial networks, which make the weights of edges: their layers with eqaccel's matrix product.

These products take as long as the convolutions they are for, or longer. Only layers of the known kinds are replaced;
the rest of a network, activations and normalisations, stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from eqaccel.patches.core import Replacement, Row, Swap, class_names
from eqaccel.patches.torch_state import model_device, model_dtype
from torch import Tensor

from eqaccel.ops import MatrixProduct, has_matrix_kernel

_NETWORKS = {"FullyConnectedNet", "RadialMLP", "ScalarMLPFunction"}
"""Classes of the networks: e3nn's, MACE's and NequIP's."""


class _Layer(Replacement):
    """A layer whose matrix product is eqaccel's, on the devices that this has a form for."""

    def __init__(self, original: Any) -> None:
        super().__init__(original)
        self.product = MatrixProduct().to(original.weight.device).train(original.training)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (num_edges, inputs) to (num_edges, outputs)."""
        if x.is_cuda or x.is_cpu:
            return self.dense(x)
        return self.original(x)


class RadialLinear(_Layer):
    """Stands in for a linear layer of a radial network: `torch.nn.Linear`, or NequIP's `ScalarLinearLayer`.

    Args:
        original: The module that the model came with.
        scale: Factor of its weights, a scalar.
        transposed: Whether its weights are (out_features, in_features).
    """

    def __init__(self, original: Any, scale: Tensor, transposed: bool) -> None:
        super().__init__(original)
        self.register_buffer("scale", scale, persistent=False)
        self.transposed = transposed

    def dense(self, x: Tensor) -> Tensor:
        """`forward` with eqaccel's product."""
        weight = self.original.weight
        if self.transposed:
            weight = weight.t()
        y = self.product(x, weight * self.scale)
        bias = self.original.bias
        return y if bias is None else y + bias


class RadialLayer(_Layer):
    """Stands in for a layer of e3nn's `FullyConnectedNet`: linear, then an activation or none.

    Args:
        original: The module that the model came with.
        scale: Factor of its weights.
        factor: Factor of its output.
    """

    def __init__(self, original: Any, scale: float, factor: float) -> None:
        super().__init__(original)
        self.act = torch.nn.Identity() if original.act is None else original.act
        self.scale, self.factor = scale, factor

    def dense(self, x: Tensor) -> Tensor:
        """`forward` with eqaccel's product."""
        y = self.act(self.product(x, self.original.weight * self.scale))
        return y if self.factor == 1.0 else y * self.factor


def radial_swaps(network: Any) -> Iterator[Swap]:
    """The replacements of the layers of a network; none if it is no known one."""
    if not class_names(network) & _NETWORKS:
        return
    for parent in network.modules():
        for name, layer in parent.named_children():
            replacement = _replacement(layer)
            if replacement is not None:
                yield Swap(parent, name, replacement, {})


def radial_rows(path: str, model: torch.nn.Module, network: Any) -> list[Row]:
    """The line of a report about a network; none if it is no known one."""
    if not class_names(network) & _NETWORKS:
        return []
    replaced = any(isinstance(module, Replacement) for module in network.modules())
    device = model_device(model)
    accelerated = replaced and (device.type == "cpu" or has_matrix_kernel(device, model_dtype(model)))
    if accelerated and device.type == "cpu":
        note = "its matrix products write into memory that is kept from call to call"
    elif accelerated:
        note = "its matrix products replaced by eqaccel.MatrixProduct"
    elif replaced:
        note = (
            "left as it was: on a GPU, eqaccel.MatrixProduct has a kernel for float32 and compute capability 9.0 "
            "alone, where torch is not allowed TensorFloat-32"
        )
    elif next(radial_swaps(network), None) is not None:
        note = "left: not patched yet, eqaccel.patch(model) replaces its matrix products"
    else:
        note = "left: dense matrix products, which torch does well"
    return [Row(path, type(network).__name__, accelerated, note)]


def _replacement(layer: Any) -> Replacement | None:
    """What stands in for a layer; None if it is of no known kind."""
    kind = type(layer).__name__
    if kind == "_Layer" and {"h_in", "var_in", "var_out", "act"} <= vars(layer).keys() | layer._modules.keys():
        if layer.act is None:
            return RadialLayer(layer, float(layer.h_in * layer.var_in / layer.var_out) ** -0.5, 1.0)
        return RadialLayer(layer, float(layer.h_in * layer.var_in) ** -0.5, float(layer.var_out) ** 0.5)
    if kind == "ScalarLinearLayer" and hasattr(layer, "alpha"):
        return RadialLinear(layer, layer.alpha, False)
    if type(layer) is torch.nn.Linear:
        return RadialLinear(layer, layer.weight.detach().new_ones(()), True)
    return None

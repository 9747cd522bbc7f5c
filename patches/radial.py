"""The radial networks, which make the weights of edges: their layers with eqaccel's matrix product.

These products take as long as the convolutions they are for, or longer. Only layers of the known kinds are replaced;
the rest of a network, activations and normalisations, stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from eqaccel.patches.kind import class_names
from eqaccel.patches.replacement import Replacement, Swap, plain_class
from eqaccel.patches.report import ReportRow
from eqaccel.patches.torch_state import model_device
from torch import Tensor

from eqaccel.ops import MatrixProduct, has_matrix_kernel
from eqaccel.prepare import model_dtype

_NETWORKS = {"FullyConnectedNet", "RadialMLP", "ScalarMLPFunction"}
"""Classes of the networks: e3nn's, MACE's and NequIP's."""


class _Layer(Replacement):
    """A layer whose matrix product is eqaccel's, on the devices that this has a form for."""

    def forward(self, x: Tensor) -> Tensor:
        """Maps (num_edges, inputs) to (num_edges, outputs)."""
        if x.dim() == 2 and (x.is_cuda or x.is_cpu):
            return self.dense(x)
        return self.plain_forward(x)

    def remake(self) -> torch.nn.Module:
        """See `Replacement`; factors are read at every call."""
        return self.eqaccel


class RadialLinear(_Layer):
    """A `torch.nn.Linear` of a radial network."""

    def dense(self, x: Tensor) -> Tensor:
        """`forward` with eqaccel's product."""
        y = self.eqaccel(x, self.weight.t())
        return y if self.bias is None else y + self.bias


class RadialScaledLinear(_Layer):
    """A `ScalarLinearLayer` of NequIP's, whose weights are (in_features, out_features) and have a factor."""

    def dense(self, x: Tensor) -> Tensor:
        """`forward` with eqaccel's product."""
        y = self.eqaccel(x, self.weight * self.alpha)
        return y if self.bias is None else y + self.bias


class RadialLayer(_Layer):
    """A layer of e3nn's `FullyConnectedNet`: linear, then an activation or none."""

    def dense(self, x: Tensor) -> Tensor:
        """`forward` with eqaccel's product."""
        if self.act is None:
            return self.eqaccel(x, self.weight * (self.h_in * self.var_in / self.var_out) ** -0.5)
        y = self.act(self.eqaccel(x, self.weight * (self.h_in * self.var_in) ** -0.5))
        return y if self.var_out == 1.0 else y * self.var_out**0.5


def radial_swaps(network: Any) -> Iterator[Swap]:
    """The replacements of the layers of a network; none if it is no known one."""
    if not class_names(network) & _NETWORKS:
        return
    for parent in network.modules():
        for name, layer in parent.named_children():
            kind = _replacement(layer)
            if kind is not None:
                product = MatrixProduct().to(layer.weight.device)
                yield Swap(parent, name, kind, product)


def radial_rows(path: str, model: torch.nn.Module, network: Any) -> list[ReportRow]:
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
    return [ReportRow(path, type(network).__name__, accelerated, note, idle=replaced and not accelerated)]


def _replacement(layer: Any) -> type[_Layer] | None:
    """What a layer becomes; None if it is of no known kind."""
    own = plain_class(layer)
    kind = own.__name__
    if kind == "_Layer" and {"h_in", "var_in", "var_out", "act"} <= vars(layer).keys() | layer._modules.keys():
        return RadialLayer
    if kind == "ScalarLinearLayer" and hasattr(layer, "alpha"):
        return RadialScaledLinear
    return RadialLinear if own is torch.nn.Linear else None

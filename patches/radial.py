"""The radial networks, which make the weights of edges: their layers with eqaccel's matrix product and activation.

These products take as long as the convolutions they are for, or longer. Only layers of the known kinds are replaced,
and activations that are SiLU; the rest of a network, such as normalisations, stays.
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
from torch.nn.functional import silu

from eqaccel.errors import PatchError
from eqaccel.families.silu import SiluSpec
from eqaccel.ops import MatrixProduct, ScaledSilu, has_matrix_kernel
from eqaccel.prepare import model_dtype

_NO_KERNEL = (
    "on a GPU, eqaccel.MatrixProduct has a kernel for float32 and compute capability 9.0 alone, where torch is not "
    "allowed TensorFloat-32"
)

_NETWORKS = {"FullyConnectedNet", "RadialMLP", "ScalarMLPFunction"}
"""Classes of the networks: e3nn's, MACE's and NequIP's."""


class _Layer(Replacement):
    """A layer whose matrix product or activation is eqaccel's, on the devices that this has a form for."""

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


class RadialActivation(_Layer):
    """A `torch.nn.SiLU` of a radial network."""

    def dense(self, x: Tensor) -> Tensor:
        """`forward` with eqaccel's activation."""
        return self.eqaccel(x)


class RadialSiluLayer(_Layer):
    """A layer of e3nn's `FullyConnectedNet` whose activation is SiLU: factors of its weights go into that."""

    def dense(self, x: Tensor) -> Tensor:
        """`forward` with eqaccel's product and activation."""
        return self.eqaccel.activation(self.eqaccel.product(x, self.weight))

    def remake(self) -> torch.nn.Module:
        """See `Replacement`; the activation may have been exchanged."""
        factor = _silu_factor(self.act)
        if factor is None:
            raise PatchError(f"{type(self.act).__name__}: its activation is not SiLU any more")
        return _SiluLayer(self, factor).to(self.weight.device)


class _SiluLayer(torch.nn.Module):
    """What a `RadialSiluLayer` computes with.

    Args:
        layer: The layer.
        factor: What its activation multiplies SiLU by.
    """

    def __init__(self, layer: Any, factor: float) -> None:
        super().__init__()
        self.product = MatrixProduct()
        spec = SiluSpec(factor * layer.var_out**0.5, (layer.h_in * layer.var_in) ** -0.5)
        self.activation = ScaledSilu(spec)


class RadialLayer(_Layer):
    """A layer of e3nn's `FullyConnectedNet`: linear, then another activation or none."""

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
            form = _form(layer)
            if form is not None:
                yield Swap(parent, name, form[0], form[1].to(model_device(network)))


def radial_rows(path: str, model: torch.nn.Module, network: Any) -> list[ReportRow]:
    """The line of a report about a network; none if it is no known one."""
    if not class_names(network) & _NETWORKS:
        return []
    layers = [module for module in network.modules() if isinstance(module, _Layer)]
    device = model_device(model)
    has_kernel = device.type == "cpu" or has_matrix_kernel(device, model_dtype(model))
    activates = any(isinstance(layer, (RadialActivation, RadialSiluLayer)) for layer in layers)
    accelerated = bool(layers) and (has_kernel or activates)
    activations = "and its activations by eqaccel.ScaledSilu" if activates else "its activations left"
    if accelerated and has_kernel:
        note = f"its matrix products replaced by eqaccel.MatrixProduct, {activations}"
    elif accelerated:
        note = f"its activations replaced by eqaccel.ScaledSilu, its matrix products left: {_NO_KERNEL}"
    elif layers:
        note = f"left as it was: {_NO_KERNEL}"
    elif next(radial_swaps(network), None) is not None:
        note = "left: not patched yet, eqaccel.patch(model) replaces its matrix products and activations"
    else:
        note = "left: dense matrix products, which torch does well"
    return [ReportRow(path, type(network).__name__, accelerated, note, idle=bool(layers) and not accelerated)]


def _form(layer: Any) -> tuple[type[_Layer], torch.nn.Module] | None:
    """What a layer becomes, and what that computes with; None if it is of no known kind."""
    own = plain_class(layer)
    if own.__name__ == "_Layer" and {"h_in", "var_in", "var_out", "act"} <= vars(layer).keys() | layer._modules.keys():
        factor = _silu_factor(layer.act)
        return (RadialLayer, MatrixProduct()) if factor is None else (RadialSiluLayer, _SiluLayer(layer, factor))
    if own.__name__ == "ScalarLinearLayer" and hasattr(layer, "alpha"):
        return RadialScaledLinear, MatrixProduct()
    if own is torch.nn.SiLU and not layer.inplace:
        return RadialActivation, ScaledSilu(SiluSpec())
    return (RadialLinear, MatrixProduct()) if own is torch.nn.Linear else None


def _silu_factor(act: Any) -> float | None:
    """What an activation of e3nn's multiplies SiLU by; None if it is something else, which its values tell too."""
    inner = getattr(act, "f", None)
    if type(act).__name__ != "normalize2mom" or not (inner is silu or isinstance(inner, torch.nn.SiLU)):
        return None
    factor = 1.0 if act._is_id else float(act.cst)
    x = torch.linspace(-8.0, 8.0, 17, dtype=torch.float64)
    with torch.no_grad():
        same = torch.equal(act(x), factor * silu(x))
    return factor if same else None

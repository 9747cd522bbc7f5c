"""The layers of e3nn's `FullyConnectedNet`, the radial network of MACE and other libraries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from eqaccel.errors import PatchError
from eqaccel.families.matrix_product import MatrixProductSpec
from eqaccel.families.silu import SiluSpec
from eqaccel.ops import MatrixProduct, ScaledSilu
from eqaccel.patches.activation_e3nn import silu_factor
from eqaccel.patches.radial import Activating, Form, LayerNumbers, RadialPart


class RadialSiluLayer(RadialPart):
    """A layer of e3nn's `FullyConnectedNet` whose activation is SiLU: factors of its weights go into that."""

    activates = True

    def dense(self, x: Tensor) -> Tensor:
        """`forward` with eqaccel's product and activation."""
        return self.eqaccel.activation(self.eqaccel.product(x, self.weight))

    def factors(self) -> Tensor:
        """See `RadialPart.factors`."""
        return self.weight

    def remake(self) -> torch.nn.Module:
        """See `Replacement`; the activation may have been exchanged."""
        factor = silu_factor(self.act)
        if factor is None:
            raise PatchError(f"{type(self.act).__name__}: its activation is not SiLU any more")
        return _SiluLayer(self, factor, self.eqaccel.product.spec).to(self.weight.device)


class _SiluLayer(Activating):
    """What a `RadialSiluLayer` computes with.

    Args:
        layer: The layer.
        factor: What its activation multiplies SiLU by.
        product: What its product makes of factors.
    """

    def __init__(self, layer: Any, factor: float, product: MatrixProductSpec) -> None:
        spec = SiluSpec(factor * layer.var_out**0.5, (layer.h_in * layer.var_in) ** -0.5)
        super().__init__(LayerNumbers(layer.weight.size(0), layer.weight.size(1), spec.factor, spec.scale))
        self.product, self.activation = MatrixProduct(product), ScaledSilu(spec)


class E3nnRadialLayer(RadialPart):
    """A layer of e3nn's `FullyConnectedNet`: linear, then another activation or none."""

    calls = frozenset({"act"})

    def dense(self, x: Tensor) -> Tensor:
        """`forward` with eqaccel's product."""
        if self.act is None:
            return self.eqaccel(x, self.factors())
        y = self.act(self.eqaccel(x, self.weight * (self.h_in * self.var_in) ** -0.5))
        return y if self.var_out == 1.0 else y * self.var_out**0.5

    def multiplies_alone(self) -> bool:
        """See `RadialPart.multiplies_alone`."""
        return self.act is None

    def factors(self) -> Tensor:
        """See `RadialPart.factors`; where it has no activation."""
        return self.weight * (self.h_in * self.var_in / self.var_out) ** -0.5


def _form(layer: Any, product: MatrixProductSpec) -> Form | None:
    if not {"h_in", "var_in", "var_out", "act"} <= vars(layer).keys() | layer._modules.keys():
        return None
    factor = silu_factor(layer.act)
    if factor is None:
        return E3nnRadialLayer, MatrixProduct(product)
    return RadialSiluLayer, _SiluLayer(layer, factor, product)


E3NN_NETWORK = "FullyConnectedNet"
"""Class of the networks."""

E3NN_LAYERS: Mapping[str, Callable[[Any, MatrixProductSpec], Form | None]] = MappingProxyType({"_Layer": _form})
"""How their layers are read, for `RadialForms`."""

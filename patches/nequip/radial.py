"""NequIP's radial networks."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from torch import Tensor

from eqaccel.families.matrix_product import MatrixProductSpec
from eqaccel.ops import MatrixProduct
from eqaccel.patches.radial import Form, RadialForms, RadialProduct
from eqaccel.patches.radial_e3nn import E3NN_LAYERS, E3NN_NETWORK


class RadialScaledLinear(RadialProduct):
    """A `ScalarLinearLayer` of NequIP's, whose weights are (in_features, out_features) and have a factor."""

    def factors(self) -> Tensor:
        """See `RadialPart.factors`."""
        return self.weight * self.alpha

    @staticmethod
    def shape_of(layer: Any) -> tuple[int, int] | None:
        """See `RadialPart.shape_of`."""
        return None if layer.bias is not None else (layer.weight.size(0), layer.weight.size(1))


def _form(layer: Any, product: MatrixProductSpec) -> Form | None:
    return (RadialScaledLinear, MatrixProduct(product)) if hasattr(layer, "alpha") else None


RADIAL_FORMS = RadialForms(
    networks=frozenset({"ScalarMLPFunction", E3NN_NETWORK}),
    layers=MappingProxyType({**E3NN_LAYERS, "ScalarLinearLayer": _form}),
)
"""How they are read; older versions have e3nn's."""

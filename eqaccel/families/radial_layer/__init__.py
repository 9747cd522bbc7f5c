"""The first layer of radial networks: a few basis functions to hidden features, with SiLU."""

from eqaccel.families.radial_layer.family import RADIAL_LAYER
from eqaccel.families.radial_layer.payload import radial_layer_payload
from eqaccel.families.radial_layer.reference import execute_radial_layer
from eqaccel.families.radial_layer.spec import MOST_INPUTS, MOST_OUTPUTS, RadialLayerSpec

__all__ = [
    "MOST_INPUTS",
    "MOST_OUTPUTS",
    "RADIAL_LAYER",
    "RadialLayerSpec",
    "execute_radial_layer",
    "radial_layer_payload",
]

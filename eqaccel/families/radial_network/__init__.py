"""Radial networks up to their last layer: basis functions to hidden features, through layers with SiLU."""

from eqaccel.families.radial_network.family import RADIAL_NETWORK
from eqaccel.families.radial_network.payload import radial_network_payload
from eqaccel.families.radial_network.reference import execute_radial_network
from eqaccel.families.radial_network.spec import RadialNetworkSpec

__all__ = ["RADIAL_NETWORK", "RadialNetworkSpec", "execute_radial_network", "radial_network_payload"]

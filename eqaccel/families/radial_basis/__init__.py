"""Radial basis functions of edges: Bessel functions of the length times a polynomial cutoff."""

from eqaccel.families.radial_basis.family import RADIAL_BASIS
from eqaccel.families.radial_basis.payload import radial_payload
from eqaccel.families.radial_basis.reference import execute_radial_basis
from eqaccel.families.radial_basis.spec import RadialBasisSpec

__all__ = ["RADIAL_BASIS", "RadialBasisSpec", "execute_radial_basis", "radial_payload"]

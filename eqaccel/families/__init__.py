"""Families of kernels: a folder each, with all that knows what the family computes.

Takes specs (irreps and instructions, terms of a polynomial); gives plans, source text, payloads and reference results.
A folder has the same parts as its neighbours, as far as they exist: `spec`, `plan`, `reference`, `body` (the printer),
preludes (headers), `payload`, and `family`, which hands them to the rest of the house as a `KernelFamily`. Knows NumPy,
targets, and what generators share (`codegen`); must not know torch, compilers or devices, nor one family another.
"""

from eqaccel.families.family import KernelFamily, TunedKernel
from eqaccel.families.gate.family import GATE
from eqaccel.families.linear.family import LINEAR
from eqaccel.families.matrix_product.family import MATRIX_PRODUCT
from eqaccel.families.neighbors.family import NEIGHBORS
from eqaccel.families.polynomial.family import POLYNOMIAL
from eqaccel.families.radial_basis.family import RADIAL_BASIS
from eqaccel.families.radial_layer.family import RADIAL_LAYER
from eqaccel.families.radial_network.family import RADIAL_NETWORK
from eqaccel.families.silu.family import SILU
from eqaccel.families.tensor_product.family import TENSOR_PRODUCT

FAMILIES: dict[str, KernelFamily] = {
    family.name: family
    for family in (
        TENSOR_PRODUCT,
        POLYNOMIAL,
        RADIAL_BASIS,
        RADIAL_LAYER,
        RADIAL_NETWORK,
        SILU,
        GATE,
        LINEAR,
        MATRIX_PRODUCT,
        NEIGHBORS,
    )
}
"""All families, by name."""

__all__ = ["FAMILIES", "KernelFamily", "TunedKernel"]

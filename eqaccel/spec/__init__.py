"""Specs: what a tensor product computes, and nothing about how.

Takes irreps, instructions and normalisations (or an e3nn module); gives a frozen, validated `TensorProductSpec` whose
`Path`s carry offsets and one number each. Must not know torch, e3nn, devices or kernels.
"""

from eqaccel.spec.instruction import ConnectionMode, Instruction, InstructionLike
from eqaccel.spec.path import Path
from eqaccel.spec.polynomial import MAX_POWER, PolynomialSpec, Term
from eqaccel.spec.tensor_product import MAX_DEGREE, TensorProductSpec

__all__ = [
    "MAX_DEGREE",
    "MAX_POWER",
    "ConnectionMode",
    "Instruction",
    "InstructionLike",
    "Path",
    "PolynomialSpec",
    "TensorProductSpec",
    "Term",
]

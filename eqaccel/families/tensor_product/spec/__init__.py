"""What a tensor product computes, and nothing about how: a frozen, validated `TensorProductSpec` and its paths."""

from eqaccel.families.tensor_product.spec.instruction import (
    ConnectionMode,
    Instruction,
    InstructionLike,
    Mixing,
    Pairs,
)
from eqaccel.families.tensor_product.spec.path import Path
from eqaccel.families.tensor_product.spec.tensor_product import MAX_DEGREE, Layout, TensorProductSpec
from eqaccel.families.tensor_product.spec.text import read_spec_text, spec_text
from eqaccel.families.tensor_product.spec.unmixed import UnmixedProduct, unmixed

__all__ = [
    "MAX_DEGREE",
    "ConnectionMode",
    "Instruction",
    "InstructionLike",
    "Layout",
    "Mixing",
    "Pairs",
    "Path",
    "TensorProductSpec",
    "UnmixedProduct",
    "read_spec_text",
    "spec_text",
    "unmixed",
]

"""How a tensor product is computed on a target: edge matrices, segments and launch numbers, as plain data."""

from eqaccel.families.tensor_product.plan.build import is_ordered_for, make_plan
from eqaccel.families.tensor_product.plan.candidates import candidates
from eqaccel.families.tensor_product.plan.model import (
    Block,
    CopySpan,
    EdgeMatrix,
    Element,
    KernelPlan,
    Part,
    Plan,
    PlannedPath,
    Segment,
)
from eqaccel.families.tensor_product.plan.tuning import UNTUNED, Tuning

__all__ = [
    "UNTUNED",
    "Block",
    "CopySpan",
    "EdgeMatrix",
    "Element",
    "KernelPlan",
    "Part",
    "Plan",
    "PlannedPath",
    "Segment",
    "Tuning",
    "candidates",
    "is_ordered_for",
    "make_plan",
]

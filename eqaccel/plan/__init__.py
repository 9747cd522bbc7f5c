"""How a tensor product is computed: paths, edge matrices, segments and launch numbers, as plain data.

Takes a `TensorProductSpec` and a `Target`; gives a `Plan` for one direction and one scalar type. Knows NumPy and
the spec; must not know torch, source text, compilers or devices. `reference.execute` runs a plan in NumPy and is the
definition that every backend is tested against.
"""

from eqaccel.plan.build import make_plan
from eqaccel.plan.candidates import candidates
from eqaccel.plan.model import (
    Block,
    CopySpan,
    Direction,
    EdgeMatrix,
    Element,
    KernelPlan,
    Part,
    Plan,
    PlannedPath,
    Segment,
)
from eqaccel.plan.polynomial import execute_polynomial
from eqaccel.plan.reference import execute
from eqaccel.plan.target import MACHINE_CLASSES, TARGETS, Target, host_target
from eqaccel.plan.tuning import UNTUNED, TunedKernel, Tuning

__all__ = [
    "MACHINE_CLASSES",
    "TARGETS",
    "UNTUNED",
    "Block",
    "CopySpan",
    "Direction",
    "EdgeMatrix",
    "Element",
    "KernelPlan",
    "Part",
    "Plan",
    "PlannedPath",
    "Segment",
    "Target",
    "TunedKernel",
    "Tuning",
    "candidates",
    "execute",
    "execute_polynomial",
    "host_target",
    "make_plan",
]

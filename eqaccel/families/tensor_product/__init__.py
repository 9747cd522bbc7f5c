"""Tensor products of irreps, of any connection mode, of rows or summed over the edges of a graph.

spec: irreps, instructions and normalisations become paths, with offsets and one number each.
plan: paths become edge matrices, segments and launch numbers, for a target; tunings of that.
reference: runs a plan in NumPy, and so defines what every backend has to compute.
body: a plan becomes one C++ text, whatever the backend.
pairs: plan, reference and body of products that are not channel by channel.
generators: which of the two a spec is computed by.
check, payload: what right kernels give on a small graph; all kernels in one string of bytes.
"""

from eqaccel.families.family import TunedKernel
from eqaccel.families.tensor_product import check
from eqaccel.families.tensor_product.family import TENSOR_PRODUCT
from eqaccel.families.tensor_product.generators import body_of, plan_of
from eqaccel.families.tensor_product.payload import (
    gpu_plans,
    payload,
    source,
    third_payload,
    third_payload_of,
    travelling_plan,
)
from eqaccel.families.tensor_product.plan import (
    UNTUNED,
    KernelPlan,
    Plan,
    Tuning,
    candidates,
    make_plan,
)
from eqaccel.families.tensor_product.reference import execute
from eqaccel.families.tensor_product.spec import (
    MAX_DEGREE,
    ConnectionMode,
    Instruction,
    InstructionLike,
    Layout,
    Mixing,
    Pairs,
    Path,
    TensorProductSpec,
    UnmixedProduct,
    unmixed,
)

__all__ = [
    "MAX_DEGREE",
    "TENSOR_PRODUCT",
    "UNTUNED",
    "ConnectionMode",
    "Instruction",
    "InstructionLike",
    "KernelPlan",
    "Layout",
    "Mixing",
    "Pairs",
    "Path",
    "Plan",
    "TensorProductSpec",
    "TunedKernel",
    "Tuning",
    "UnmixedProduct",
    "body_of",
    "candidates",
    "check",
    "execute",
    "gpu_plans",
    "make_plan",
    "payload",
    "plan_of",
    "source",
    "third_payload",
    "third_payload_of",
    "travelling_plan",
    "unmixed",
]

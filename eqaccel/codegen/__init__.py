"""From plans to source text: one body for every backend, a prelude for each, and the payload that carries them.

Takes a `TensorProductSpec`; gives C-family source text and the payload, the bytes that hold every source of a tensor
product and travel inside a module. Knows plans; must not know torch, compilers or devices.
"""

from eqaccel.codegen.body import print_body
from eqaccel.codegen.matrix_product import matrix_payload
from eqaccel.codegen.payload import gpu_plans, payload, payload_key, prelude, source, travelling_plan
from eqaccel.codegen.polynomial import polynomial_payload

__all__ = [
    "gpu_plans",
    "matrix_payload",
    "payload",
    "payload_key",
    "polynomial_payload",
    "prelude",
    "print_body",
    "source",
    "travelling_plan",
]

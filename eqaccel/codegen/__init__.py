"""What the generators of all families of kernels share: directions, preludes, payloads, and numbers for the self-check.

A family (`eqaccel.families`) takes from here what a backend calls things and how texts travel; it gives text of its
own. Knows no family, and must not know torch, compilers or devices.
"""

from eqaccel.codegen.direction import COMMON, OUTPUTS, Direction, Result
from eqaccel.codegen.payload import SCALAR_BYTES, SCALARS, pack, payload_key, translation_unit
from eqaccel.codegen.preludes import family_prelude, flatten_prelude

__all__ = [
    "COMMON",
    "OUTPUTS",
    "SCALARS",
    "SCALAR_BYTES",
    "Direction",
    "Result",
    "family_prelude",
    "flatten_prelude",
    "pack",
    "payload_key",
    "translation_unit",
]

"""SiLU, the activation of radial networks, with a factor."""

from eqaccel.families.silu.family import SILU
from eqaccel.families.silu.payload import silu_payload
from eqaccel.families.silu.reference import execute_silu
from eqaccel.families.silu.spec import SiluSpec

__all__ = ["SILU", "SiluSpec", "execute_silu", "silu_payload"]

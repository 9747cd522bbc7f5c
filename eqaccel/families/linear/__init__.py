"""Linear maps of irreps, the same for all rows or mixed by attributes of each row: products with one-hot species."""

from eqaccel.families.linear.family import LINEAR
from eqaccel.families.linear.payload import linear_payload
from eqaccel.families.linear.reference import execute_linear
from eqaccel.families.linear.spec import LinearPath, LinearSpec

__all__ = ["LINEAR", "LinearPath", "LinearSpec", "execute_linear", "linear_payload"]

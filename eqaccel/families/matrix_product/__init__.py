"""Plain matrix products on tensor cores, with the accuracy of float32: one kernel for all shapes."""

from eqaccel.families.matrix_product.family import MATRIX_PRODUCT
from eqaccel.families.matrix_product.payload import matrix_payload

__all__ = ["MATRIX_PRODUCT", "matrix_payload"]

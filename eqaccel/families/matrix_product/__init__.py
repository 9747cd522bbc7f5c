"""Plain matrix products on tensor cores, with the accuracy of float32 or of single products; kernels for all shapes."""

from eqaccel.families.matrix_product.family import MATRIX_PRODUCT
from eqaccel.families.matrix_product.payload import matrix_payload
from eqaccel.families.matrix_product.spec import Factors, MatrixProductSpec

__all__ = ["MATRIX_PRODUCT", "Factors", "MatrixProductSpec", "matrix_payload"]

"""The family of plain matrix products."""

from __future__ import annotations

from typing import Any

import numpy as np

from eqaccel.codegen import Direction, Result
from eqaccel.families.family import KernelFamily, TunedKernel
from eqaccel.families.matrix_product.body import print_host_product, print_products
from eqaccel.families.matrix_product.payload import NAME, explain, matrix_payload, matrix_prelude
from eqaccel.targets import Target


class _MatrixProducts(KernelFamily):
    name = NAME
    directions = (Direction.FORWARD,)

    def payload(self, spec: None = None, tuned: tuple[TunedKernel, ...] = ()) -> tuple[bytes, int]:
        return matrix_payload()

    def prelude(self, backend: str) -> str:
        return matrix_prelude(backend)

    def body(self, spec: None, direction: Direction, target: Target, scalar_bytes: int, tuning: Any = None) -> str:
        return print_host_product() if target.backend == "cpu" else print_products()

    def explain(self, spec: None, direction: Direction, target: Target, scalar_bytes: int) -> str:
        return explain(target.backend)

    def reference(self, spec: None, direction: Direction, *, absolute: bool = False, **operands: Any) -> Result:
        a, b = operands["a"], operands["b"]
        return Result(z=np.abs(a) @ np.abs(b) if absolute else a @ b)


MATRIX_PRODUCT: KernelFamily = _MatrixProducts()

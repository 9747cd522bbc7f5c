"""The family of plain matrix products."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from eqaccel.codegen import Direction, Result
from eqaccel.families.family import KernelFamily, TunedKernel
from eqaccel.families.matrix_product.payload import NAME, body_of, explain, matrix_payload, matrix_prelude
from eqaccel.families.matrix_product.spec import MatrixProductSpec
from eqaccel.families.words import Word
from eqaccel.targets import Target


class _MatrixProducts(KernelFamily):
    name = NAME
    directions = (Direction.FORWARD,)
    words = (Word("factors", is_required=False),)
    examples: ClassVar = {"split": ("factors=split",), "rounded": ("factors=rounded",)}

    def make_spec(self, **arguments: Any) -> MatrixProductSpec:
        return MatrixProductSpec(**arguments)

    def payload(self, spec: MatrixProductSpec, tuned: tuple[TunedKernel, ...] = ()) -> tuple[bytes, int]:
        return matrix_payload(spec)

    def prelude(self, backend: str) -> str:
        return matrix_prelude(backend)

    def body(
        self, spec: MatrixProductSpec, direction: Direction, target: Target, scalar_bytes: int, tuning: Any = None
    ) -> str:
        return body_of(spec, target)

    def explain(self, spec: MatrixProductSpec, direction: Direction, target: Target, scalar_bytes: int) -> str:
        return explain(spec, target)

    def reference(
        self, spec: MatrixProductSpec, direction: Direction, *, absolute: bool = False, **operands: Any
    ) -> Result:
        a, b = operands["a"], operands["b"]
        return Result(z=np.abs(a) @ np.abs(b) if absolute else a @ b)


MATRIX_PRODUCT: KernelFamily = _MatrixProducts()

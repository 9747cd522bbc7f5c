"""The family of tensor products and their graph convolutions."""

from __future__ import annotations

from typing import Any, ClassVar

from eqaccel.codegen import Direction, Result
from eqaccel.families.family import KernelFamily, TunedKernel
from eqaccel.families.tensor_product.body import print_body
from eqaccel.families.tensor_product.payload import NAME, payload, prelude, travelling_plan
from eqaccel.families.tensor_product.plan import Tuning, candidates, make_plan
from eqaccel.families.tensor_product.reference import execute
from eqaccel.families.tensor_product.spec import TensorProductSpec
from eqaccel.families.words import Word
from eqaccel.targets import Target, host_target


class _TensorProducts(KernelFamily):
    name = NAME
    words = (Word("irreps_in1"), Word("irreps_in2"), Word("irreps_out"), Word("convention", is_required=False))
    examples: ClassVar = {
        "mace-medium": ("128x0e+128x1o", "0e+1o+2e+3o", "128x0e+128x1o+128x2e"),
        "mace-large": ("128x0e+128x1o+128x2e", "0e+1o+2e+3o", "128x0e+128x1o+128x2e+128x3o"),
        "nequip-l": ("128x0e+64x1o+32x2e+32x3o", "0e+1o+2e+3o", "128x0e+64x1o+32x2e+32x3o"),
    }

    def make_spec(self, **arguments: Any) -> TensorProductSpec:
        return TensorProductSpec.channelwise(**arguments)

    def payload(self, spec: TensorProductSpec, tuned: tuple[TunedKernel, ...] = ()) -> tuple[bytes, int]:
        return payload(spec, tuned)

    def prelude(self, backend: str) -> str:
        return prelude(backend)

    def body(
        self,
        spec: TensorProductSpec,
        direction: Direction,
        target: Target,
        scalar_bytes: int,
        tuning: Tuning | None = None,
    ) -> str:
        if tuning is None:
            return print_body(travelling_plan(spec, direction, target, scalar_bytes))
        return print_body(make_plan(spec, direction, target, scalar_bytes, tuning))

    def explain(self, spec: TensorProductSpec, direction: Direction, target: Target, scalar_bytes: int) -> str:
        return travelling_plan(spec, direction, target, scalar_bytes).explain()

    def reference(
        self, spec: TensorProductSpec, direction: Direction, *, absolute: bool = False, **operands: Any
    ) -> Result:
        return execute(make_plan(spec, direction, host_target(), 8), absolute=absolute, **operands)

    def tunings(
        self, spec: TensorProductSpec, direction: Direction, target: Target, scalar_bytes: int
    ) -> tuple[Tuning, ...]:
        return candidates(spec, direction, target, scalar_bytes)


TENSOR_PRODUCT: KernelFamily = _TensorProducts()

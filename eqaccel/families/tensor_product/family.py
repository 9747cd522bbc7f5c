"""The family of tensor products and their graph convolutions."""

from __future__ import annotations

from typing import Any, ClassVar

from eqaccel.codegen import Direction, Result
from eqaccel.families.family import KernelFamily, TunedKernel
from eqaccel.families.tensor_product.generators import CHANNELWISE, AnyPlan, body_of, generator, plan_of
from eqaccel.families.tensor_product.payload import NAME, payload, source, third_payload, travelling_plan
from eqaccel.families.tensor_product.plan import Tuning
from eqaccel.families.tensor_product.spec import TensorProductSpec
from eqaccel.families.words import Word
from eqaccel.targets import Target, host_target


class _TensorProducts(KernelFamily):
    name = NAME
    directions = tuple(Direction)
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

    def payload_of(self, spec: TensorProductSpec, direction: Direction) -> tuple[bytes, int] | None:
        return third_payload(spec) if direction is Direction.TRIPLE_BACKWARD else payload(spec)

    def prelude(self, backend: str) -> str:
        """That of products channel by channel; `source` has the right one for each spec."""
        return CHANNELWISE.prelude(backend)

    def source(
        self,
        spec: TensorProductSpec,
        direction: Direction,
        target: Target,
        scalar_bytes: int,
        tuning: Tuning | None = None,
    ) -> str:
        return source(_plan(spec, direction, target, scalar_bytes, tuning))

    def body(
        self,
        spec: TensorProductSpec,
        direction: Direction,
        target: Target,
        scalar_bytes: int,
        tuning: Tuning | None = None,
    ) -> str:
        return body_of(_plan(spec, direction, target, scalar_bytes, tuning))

    def explain(self, spec: TensorProductSpec, direction: Direction, target: Target, scalar_bytes: int) -> str:
        account: str = travelling_plan(spec, direction, target, scalar_bytes).explain()
        return account

    def reference(
        self, spec: TensorProductSpec, direction: Direction, *, absolute: bool = False, **operands: Any
    ) -> Result:
        plan = plan_of(spec, direction, host_target(), 8)
        return generator(spec).execute(plan, absolute=absolute, **operands)

    def tunings(
        self, spec: TensorProductSpec, direction: Direction, target: Target, scalar_bytes: int
    ) -> tuple[Tuning, ...]:
        return generator(spec).tunings(spec, direction, target, scalar_bytes)


def _plan(
    spec: TensorProductSpec, direction: Direction, target: Target, scalar_bytes: int, tuning: Tuning | None
) -> AnyPlan:
    """The plan of a tuning; with None that of the kernel in the payload."""
    if tuning is None:
        return travelling_plan(spec, direction, target, scalar_bytes)
    return plan_of(spec, direction, target, scalar_bytes, tuning)


TENSOR_PRODUCT: KernelFamily = _TensorProducts()

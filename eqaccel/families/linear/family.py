"""The family of linear maps of irreps."""

from __future__ import annotations

from typing import Any, ClassVar

from eqaccel.codegen import Direction, Result
from eqaccel.families.family import KernelFamily, TunedKernel
from eqaccel.families.linear.payload import (
    DIRECTIONS,
    NAME,
    cpu_tables,
    explain,
    linear_payload,
    linear_prelude,
    print_body,
)
from eqaccel.families.linear.reference import execute_linear
from eqaccel.families.linear.spec import LinearSpec
from eqaccel.families.words import Word
from eqaccel.targets import Target


class _LinearMaps(KernelFamily):
    name = NAME
    directions = DIRECTIONS
    words = (Word("irreps_in"), Word("irreps_out"), Word("num_attributes", int, is_required=False))
    examples: ClassVar = {"mace-medium": ("128x0e+128x1o", "128x0e+128x1o")}

    def make_spec(self, **arguments: Any) -> LinearSpec:
        return LinearSpec.of_all_pairs(**arguments)

    def payload(self, spec: LinearSpec, tuned: tuple[TunedKernel, ...] = ()) -> tuple[bytes, int]:
        return linear_payload(spec)

    def prelude(self, backend: str) -> str:
        return linear_prelude(backend)

    def body(
        self, spec: LinearSpec, direction: Direction, target: Target, scalar_bytes: int, tuning: Any = None
    ) -> str:
        return print_body(spec, direction, None if target.backend == "cpu" else scalar_bytes)

    def cpu_tables(self, spec: LinearSpec, direction: Direction) -> str:
        return cpu_tables(spec, direction)

    def explain(self, spec: LinearSpec, direction: Direction, target: Target, scalar_bytes: int) -> str:
        return explain(spec, direction)

    def reference(self, spec: LinearSpec, direction: Direction, *, absolute: bool = False, **operands: Any) -> Result:
        return execute_linear(spec, direction, absolute=absolute, **operands)


LINEAR: KernelFamily = _LinearMaps()

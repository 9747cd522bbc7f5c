"""The family of SiLU with a factor."""

from __future__ import annotations

from typing import Any, ClassVar

from eqaccel.codegen import Direction, Result
from eqaccel.families.family import KernelFamily, TunedKernel
from eqaccel.families.silu.body import print_silu
from eqaccel.families.silu.payload import NAME, explain, silu_payload, silu_prelude
from eqaccel.families.silu.reference import execute_silu
from eqaccel.families.silu.spec import SiluSpec
from eqaccel.families.words import Word
from eqaccel.targets import Target


class _Silu(KernelFamily):
    name = NAME
    words = (Word("factor", float, is_required=False), Word("scale", float, is_required=False))
    examples: ClassVar = {"mace-medium": ("factor=1.679", "scale=0.125")}

    def make_spec(self, **arguments: Any) -> SiluSpec:
        return SiluSpec(**arguments)

    def payload(self, spec: SiluSpec, tuned: tuple[TunedKernel, ...] = ()) -> tuple[bytes, int]:
        return silu_payload(spec)

    def prelude(self, backend: str) -> str:
        return silu_prelude(backend)

    def body(self, spec: SiluSpec, direction: Direction, target: Target, scalar_bytes: int, tuning: Any = None) -> str:
        return print_silu(spec)  # for all directions, machines and scalars

    def explain(self, spec: SiluSpec, direction: Direction, target: Target, scalar_bytes: int) -> str:
        return explain(spec, direction)

    def reference(self, spec: SiluSpec, direction: Direction, *, absolute: bool = False, **operands: Any) -> Result:
        return execute_silu(spec, direction, absolute=absolute, **operands)


SILU: KernelFamily = _Silu()

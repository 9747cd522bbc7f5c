"""The family of gates."""

from __future__ import annotations

from typing import Any, ClassVar

from eqaccel.codegen import Direction, Result
from eqaccel.families.family import KernelFamily, TunedKernel
from eqaccel.families.gate.body import print_gate
from eqaccel.families.gate.payload import NAME, explain, gate_payload, gate_prelude
from eqaccel.families.gate.reference import execute_gate
from eqaccel.families.gate.spec import Activation, GateSpec
from eqaccel.families.words import Word
from eqaccel.targets import Target


class _Gate(KernelFamily):
    name = NAME
    words = (
        Word("scalars", int),
        Word("gated"),
        Word("activation", is_required=False),
        Word("factor", float, is_required=False),
    )
    examples: ClassVar = {"nequip-l": ("128", "64x1o+32x2e+32x3o", "silu", "1.679")}

    def make_spec(self, **arguments: Any) -> GateSpec:
        activation = Activation(arguments.get("activation", "silu"), arguments.get("factor", 1.0))
        return GateSpec.of_irreps(arguments["scalars"], arguments["gated"], activation)

    def payload(self, spec: GateSpec, tuned: tuple[TunedKernel, ...] = ()) -> tuple[bytes, int]:
        return gate_payload(spec)

    def prelude(self, backend: str) -> str:
        return gate_prelude(backend)

    def body(self, spec: GateSpec, direction: Direction, target: Target, scalar_bytes: int, tuning: Any = None) -> str:
        return print_gate(spec)  # for all directions, machines and scalars

    def explain(self, spec: GateSpec, direction: Direction, target: Target, scalar_bytes: int) -> str:
        return explain(spec, direction)

    def reference(self, spec: GateSpec, direction: Direction, *, absolute: bool = False, **operands: Any) -> Result:
        return execute_gate(spec, direction, absolute=absolute, **operands)


GATE: KernelFamily = _Gate()

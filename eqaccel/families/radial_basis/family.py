"""The family of radial basis functions."""

from __future__ import annotations

from typing import Any, ClassVar

from eqaccel.codegen import Direction, Result
from eqaccel.families.family import KernelFamily, TunedKernel
from eqaccel.families.radial_basis.body import print_radial_basis
from eqaccel.families.radial_basis.payload import NAME, explain, radial_payload, radial_prelude
from eqaccel.families.radial_basis.reference import execute_radial_basis
from eqaccel.families.radial_basis.spec import RadialBasisSpec
from eqaccel.families.words import Word, yes_or_no
from eqaccel.targets import Target


class _RadialBases(KernelFamily):
    name = NAME
    words = (
        Word("num_basis", int),
        Word("r_max", float),
        Word("power", int),
        Word("factor", float, is_required=False),
        Word("unit", float, is_required=False),
        Word("is_undefined_at_zero", yes_or_no, is_required=False),
    )
    examples: ClassVar = {"mace-medium": ("8", "6.0", "5")}

    def make_spec(self, **arguments: Any) -> RadialBasisSpec:
        return RadialBasisSpec(**arguments)

    def payload(self, spec: RadialBasisSpec, tuned: tuple[TunedKernel, ...] = ()) -> tuple[bytes, int]:
        return radial_payload(spec)

    def prelude(self, backend: str) -> str:
        return radial_prelude(backend)

    def body(
        self, spec: RadialBasisSpec, direction: Direction, target: Target, scalar_bytes: int, tuning: Any = None
    ) -> str:
        return print_radial_basis(spec)  # for all directions, machines and scalars

    def explain(self, spec: RadialBasisSpec, direction: Direction, target: Target, scalar_bytes: int) -> str:
        return explain(spec, direction)

    def reference(
        self, spec: RadialBasisSpec, direction: Direction, *, absolute: bool = False, **operands: Any
    ) -> Result:
        return execute_radial_basis(spec, direction, absolute=absolute, **operands)


RADIAL_BASIS: KernelFamily = _RadialBases()

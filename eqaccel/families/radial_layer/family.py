"""The family of the first layers of radial networks."""

from __future__ import annotations

from typing import Any, ClassVar

from eqaccel.codegen import Direction, Result
from eqaccel.families.family import KernelFamily, TunedKernel
from eqaccel.families.radial_layer.body import print_radial_layer
from eqaccel.families.radial_layer.payload import (
    DIRECTIONS,
    NAME,
    explain,
    radial_layer_payload,
    radial_layer_prelude,
)
from eqaccel.families.radial_layer.reference import execute_radial_layer
from eqaccel.families.radial_layer.spec import RadialLayerSpec
from eqaccel.families.words import Word
from eqaccel.targets import Target


class _RadialLayer(KernelFamily):
    name = NAME
    directions = DIRECTIONS
    words = (
        Word("num_inputs", int),
        Word("num_outputs", int),
        Word("factor", float, is_required=False),
        Word("scale", float, is_required=False),
    )
    examples: ClassVar = {"mace-medium": ("8", "64", "factor=1.679", "scale=0.354")}

    def make_spec(self, **arguments: Any) -> RadialLayerSpec:
        return RadialLayerSpec(**arguments)

    def payload(self, spec: RadialLayerSpec, tuned: tuple[TunedKernel, ...] = ()) -> tuple[bytes, int]:
        return radial_layer_payload(spec)

    def prelude(self, backend: str) -> str:
        return radial_layer_prelude(backend)

    def body(
        self, spec: RadialLayerSpec, direction: Direction, target: Target, scalar_bytes: int, tuning: Any = None
    ) -> str:
        return print_radial_layer(spec)  # for both directions, all machines and scalars

    def explain(self, spec: RadialLayerSpec, direction: Direction, target: Target, scalar_bytes: int) -> str:
        return explain(spec, direction)

    def reference(
        self, spec: RadialLayerSpec, direction: Direction, *, absolute: bool = False, **operands: Any
    ) -> Result:
        return execute_radial_layer(spec, direction, absolute=absolute, **operands)


RADIAL_LAYER: KernelFamily = _RadialLayer()

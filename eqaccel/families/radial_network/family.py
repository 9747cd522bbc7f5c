"""The family of radial networks."""

from __future__ import annotations

from typing import Any, ClassVar

from eqaccel.codegen import Direction, Result
from eqaccel.errors import UnsupportedError
from eqaccel.families.family import KernelFamily, TunedKernel
from eqaccel.families.radial_network.body import print_radial_network
from eqaccel.families.radial_network.payload import (
    DIRECTIONS,
    NAME,
    explain,
    radial_network_payload,
    radial_network_prelude,
)
from eqaccel.families.radial_network.reference import execute_radial_network
from eqaccel.families.radial_network.spec import RadialNetworkSpec
from eqaccel.families.words import Word
from eqaccel.targets import Target


def _integers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split(",")))


class _RadialNetwork(KernelFamily):
    name = NAME
    directions = DIRECTIONS
    words = (
        Word("widths", _integers),
        Word("factors", _numbers, is_required=False),
        Word("scales", _numbers, is_required=False),
    )
    examples: ClassVar = {"mace-medium": ("8,64,64,64", "factors=1.679,1.679,1.679", "scales=0.354,0.125,0.125")}

    def make_spec(self, **arguments: Any) -> RadialNetworkSpec:
        return RadialNetworkSpec(**arguments)

    def payload(self, spec: RadialNetworkSpec, tuned: tuple[TunedKernel, ...] = ()) -> tuple[bytes, int]:
        return radial_network_payload(spec)

    def prelude(self, backend: str) -> str:
        return radial_network_prelude(backend)

    def body(
        self, spec: RadialNetworkSpec, direction: Direction, target: Target, scalar_bytes: int, tuning: Any = None
    ) -> str:
        if target.backend != "cuda" or scalar_bytes != 4:
            raise UnsupportedError(
                f"target: expected an NVIDIA GPU and float32, got {target.name} and float{8 * scalar_bytes}: radial "
                "networks have a kernel for tensor cores alone"
            )
        return print_radial_network(spec)  # for both directions

    def explain(self, spec: RadialNetworkSpec, direction: Direction, target: Target, scalar_bytes: int) -> str:
        return explain(spec, direction)

    def reference(
        self, spec: RadialNetworkSpec, direction: Direction, *, absolute: bool = False, **operands: Any
    ) -> Result:
        return execute_radial_network(spec, direction, absolute=absolute, **operands)


RADIAL_NETWORK: KernelFamily = _RadialNetwork()

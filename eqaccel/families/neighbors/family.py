"""The family of the kernels around a model in a simulation step, which a GPU has; a CPU runs compiled code instead."""

from __future__ import annotations

from typing import Any

from eqaccel.codegen import Direction, Result
from eqaccel.errors import UnsupportedError
from eqaccel.families.family import KernelFamily, TunedKernel
from eqaccel.families.neighbors.payload import NAME, explain, neighbors_payload, neighbors_prelude, print_neighbors
from eqaccel.families.neighbors.reference import find_neighbors
from eqaccel.targets import Target


class _Neighbors(KernelFamily):
    name = NAME
    directions = (Direction.FORWARD,)

    def payload(self, spec: None = None, tuned: tuple[TunedKernel, ...] = ()) -> tuple[bytes, int]:
        return neighbors_payload()

    def prelude(self, backend: str) -> str:
        return neighbors_prelude(backend)

    def body(self, spec: None, direction: Direction, target: Target, scalar_bytes: int, tuning: Any = None) -> str:
        if target.backend == "cpu":
            raise UnsupportedError("target: expected a GPU, got a CPU, for which neighbours are no generated kernel")
        return print_neighbors()

    def explain(self, spec: None, direction: Direction, target: Target, scalar_bytes: int) -> str:
        return explain()

    def reference(self, spec: None, direction: Direction, *, absolute: bool = False, **operands: Any) -> Result:
        return Result(z=find_neighbors(**operands))


NEIGHBORS: KernelFamily = _Neighbors()

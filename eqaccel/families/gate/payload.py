"""The payload of a gate: kernels that are the same for all machines but for their preludes."""

from __future__ import annotations

import functools

from eqaccel.codegen import COMMON, Direction, check, family_prelude, pack
from eqaccel.families.gate.body import print_gate
from eqaccel.families.gate.reference import execute_gate
from eqaccel.families.gate.spec import GateSpec

NAME = "gate"
"""Of the family."""

_ROW_THREADS = 256  # of a GPU block; each has an activation of its own, so results do not depend on it


@functools.lru_cache(maxsize=64)
def gate_payload(spec: GateSpec) -> tuple[bytes, int]:
    """The payload of a gate, and the integer key that names it.

    Meta has `row_threads`, the threads of a GPU block, and `activations`, the threads that a row takes.
    """
    entries = {f"prelude/{backend}": gate_prelude(backend) for backend in ("cpu", "cuda", "hip")}
    entries["check/blocks"] = f"x {spec.num_inputs} 1\nz {spec.num_outputs} 1\n"
    body = print_gate(spec)
    for direction in COMMON:
        for name in (f"cpu/{direction.value}", f"gpu/{direction.value}/float32", f"gpu/{direction.value}/float64"):
            entries[name], entries[f"plan/{name}"] = body, explain(spec, direction)
        entries[f"check/{direction.value}"] = _checksums(spec, direction)
    dims = {"x_dim": spec.num_inputs, "y_dim": 0, "w_dim": 0, "z_dim": spec.num_outputs}
    return pack(NAME, {**dims, "row_threads": _ROW_THREADS, "activations": spec.num_activations}, entries)


def gate_prelude(backend: str) -> str:
    """The text in front of every body of a backend."""
    return family_prelude("gate", backend, __package__)


def explain(spec: GateSpec, direction: Direction) -> str:
    """How the kernel of a direction works, in words."""
    return (
        f"{direction.value} of a gate, {spec.num_inputs} to {spec.num_outputs} columns\n  a SIMD vector of scalars or "
        f"gates at a time, or one a thread of a GPU, with the channel that it multiplies; {spec.num_activations} "
        f"a row, blocks of {_ROW_THREADS} threads\n"
    )


def _checksums(spec: GateSpec, direction: Direction) -> str:
    """What the self-check (`codegen.check`) compares a batch with."""
    widths = {"x": spec.num_inputs, "gz": spec.num_outputs, "a": spec.num_inputs}
    operands = check.batch_operands(direction, widths)
    return check.checksums(direction, functools.partial(execute_gate, spec, direction, **operands))

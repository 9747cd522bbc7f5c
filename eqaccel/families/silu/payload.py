"""The payload of SiLU: kernels that are the same for all machines but for their preludes."""

from __future__ import annotations

import functools

from eqaccel.codegen import COMMON, Direction, check, family_prelude, pack
from eqaccel.families.silu.body import print_silu
from eqaccel.families.silu.reference import execute_silu
from eqaccel.families.silu.spec import SiluSpec

NAME = "silu"
"""Of the family."""

_ROW_THREADS = 256  # of a GPU block; each takes rows of its own, so results do not depend on it
_THREAD_ELEMENTS = 4  # of a GPU thread


@functools.lru_cache(maxsize=64)
def silu_payload(spec: SiluSpec) -> tuple[bytes, int]:
    """The payload of SiLU, and the integer key that names it.

    Meta has `row_threads`, the threads of a GPU block, and `thread_elements`, the elements that each of them takes.
    """
    entries = {f"prelude/{backend}": silu_prelude(backend) for backend in ("cpu", "cuda", "hip")}
    entries["check/blocks"] = "x 1 1\nz 1 1\n"
    body = print_silu(spec)
    for direction in COMMON:
        for name in (f"cpu/{direction.value}", f"gpu/{direction.value}/float32", f"gpu/{direction.value}/float64"):
            entries[name], entries[f"plan/{name}"] = body, explain(spec, direction)
        entries[f"check/{direction.value}"] = _checksums(spec, direction)
    dims = {"x_dim": 1, "y_dim": 0, "w_dim": 0, "z_dim": 1}
    return pack(NAME, {**dims, "row_threads": _ROW_THREADS, "thread_elements": _THREAD_ELEMENTS}, entries)


def silu_prelude(backend: str) -> str:
    """The text in front of every body of a backend."""
    return family_prelude("silu", backend, __package__)


def explain(spec: SiluSpec, direction: Direction) -> str:
    """How the kernel of a direction works, in words."""
    return (
        f"{direction.value} of {spec.factor:g} SiLU({spec.scale:g} x)\n  a SIMD vector of elements at a time, or "
        f"{_THREAD_ELEMENTS} elements a thread of a GPU; blocks of {_ROW_THREADS} threads\n"
    )


def _checksums(spec: SiluSpec, direction: Direction) -> str:
    """What the self-check (`codegen.check`) compares a batch with."""
    widths = {"x": 1, "gz": 1, "a": 1}
    operands = check.batch_operands(direction, widths)
    return check.checksums(direction, functools.partial(execute_silu, spec, direction, **operands))

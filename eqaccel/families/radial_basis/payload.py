"""The payload of radial basis functions: kernels that are the same for all machines but for their preludes."""

from __future__ import annotations

import functools

from eqaccel.codegen import COMMON, Direction, check, family_prelude, pack
from eqaccel.families.radial_basis.body import print_radial_basis
from eqaccel.families.radial_basis.reference import execute_radial_basis
from eqaccel.families.radial_basis.spec import RadialBasisSpec

NAME = "radial_basis"
"""Of the family."""

_ROW_THREADS = 128  # of a GPU block; each takes rows of its own, so results do not depend on it


@functools.lru_cache(maxsize=64)
def radial_payload(spec: RadialBasisSpec) -> tuple[bytes, int]:
    """The payload of radial basis functions, and the integer key that names it.

    Meta has `row_threads`, the threads of a GPU block, of which each takes an edge.
    """
    entries = {f"prelude/{backend}": radial_prelude(backend) for backend in ("cpu", "cuda", "hip")}
    entries["check/blocks"] = f"x 1 1\nz 1 {spec.num_outputs}\n" + f"w 1 {spec.num_basis}\n" * bool(spec.num_basis)
    body = print_radial_basis(spec)
    for direction in COMMON:
        for name in (f"cpu/{direction.value}", f"gpu/{direction.value}/float32", f"gpu/{direction.value}/float64"):
            entries[name], entries[f"plan/{name}"] = body, explain(spec, direction)
        entries[f"check/{direction.value}"] = _checksums(spec, direction)
    dims = {"x_dim": 1, "y_dim": 0, "w_dim": spec.num_basis, "z_dim": spec.num_outputs}
    return pack(NAME, {**dims, "row_threads": _ROW_THREADS}, entries)


def radial_prelude(backend: str) -> str:
    """The text in front of every body of a backend."""
    return family_prelude("radial_basis", backend, __package__)


def explain(spec: RadialBasisSpec, direction: Direction) -> str:
    """How the kernel of a direction works, in words."""
    cutoff = f"cutoff of power {spec.power} at {spec.r_max:g}" if spec.power else "no cutoff"
    return (
        f"{direction.value} of radial functions: {spec.num_basis} Bessel functions, {cutoff}\n"
        f"  a lane of a SIMD vector, or a thread of a GPU, takes an edge; blocks of {_ROW_THREADS} threads\n"
    )


def _checksums(spec: RadialBasisSpec, direction: Direction) -> str:
    """What the self-check (`codegen.check`) compares a batch with."""
    widths = {"x": 1, "w": spec.num_basis, "gz": spec.num_outputs, "a": 1, "c": spec.num_basis}
    operands = check.batch_operands(direction, widths)
    return check.checksums(
        direction, lambda absolute: execute_radial_basis(spec, direction, **operands, absolute=absolute)
    )

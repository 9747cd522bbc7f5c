"""The payload of a radial layer: kernels that are the same for all machines but for their preludes."""

from __future__ import annotations

import functools

from eqaccel.codegen import Direction, check, family_prelude, pack
from eqaccel.families.radial_layer.body import THREAD_ROWS, lanes_of_row, print_radial_layer
from eqaccel.families.radial_layer.reference import execute_radial_layer
from eqaccel.families.radial_layer.spec import RadialLayerSpec

NAME = "radial_layer"
"""Of the family."""

DIRECTIONS = (Direction.FORWARD, Direction.BACKWARD)
"""The gradient with respect to x alone; other derivatives are composed."""

_ROW_THREADS = 128  # of a GPU block; each has elements of its own, so results do not depend on it


@functools.lru_cache(maxsize=64)
def radial_layer_payload(spec: RadialLayerSpec) -> tuple[bytes, int]:
    """The payload of a radial layer, and the integer key that names it.

    Meta has `row_threads`, the threads of a GPU block, `lanes_of_row`, the threads that share a row, and `thread_rows`,
    the rows that these go through; and `shared_weights`, because all rows have the same.
    """
    entries = {f"prelude/{backend}": radial_layer_prelude(backend) for backend in ("cpu", "cuda", "hip")}
    weights = spec.num_inputs * spec.num_outputs
    entries["check/blocks"] = f"x {spec.num_inputs} 1\nw {weights} 1\nz {spec.num_outputs} 1\n"
    body = print_radial_layer(spec)
    for direction in DIRECTIONS:
        for name in (f"cpu/{direction.value}", f"gpu/{direction.value}/float32", f"gpu/{direction.value}/float64"):
            entries[name], entries[f"plan/{name}"] = body, explain(spec, direction)
        entries[f"check/{direction.value}"] = _checksums(spec, direction)
    dims = {"x_dim": spec.num_inputs, "y_dim": 0, "w_dim": weights, "z_dim": spec.num_outputs, "shared_weights": 1}
    launch = {"row_threads": _ROW_THREADS, "lanes_of_row": lanes_of_row(spec), "thread_rows": THREAD_ROWS}
    return pack(NAME, {**dims, **launch}, entries)


def radial_layer_prelude(backend: str) -> str:
    """The text in front of every body of a backend."""
    return family_prelude("radial_layer", backend, __package__)


def explain(spec: RadialLayerSpec, direction: Direction) -> str:
    """How the kernel of a direction works, in words."""
    return (
        f"{direction.value} of {spec.factor:g} SiLU({spec.scale:g} x w), {spec.num_inputs} to {spec.num_outputs} "
        f"columns\n  a SIMD vector of columns at a time; on a GPU {lanes_of_row(spec)} threads a row, which keep their "
        f"weights for {THREAD_ROWS} rows; blocks of {_ROW_THREADS} threads\n"
    )


def _checksums(spec: RadialLayerSpec, direction: Direction) -> str:
    """What the self-check (`codegen.check`) compares a batch with; weights are one row."""
    operands = check.batch_operands(direction, {"x": spec.num_inputs, "gz": spec.num_outputs})
    weights = check.numbers("w", 1, spec.num_inputs * spec.num_outputs)
    operands["w"] = weights.reshape(spec.num_inputs, spec.num_outputs)
    return check.checksums(direction, functools.partial(execute_radial_layer, spec, direction, **operands))

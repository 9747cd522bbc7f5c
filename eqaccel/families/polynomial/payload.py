"""The payload of a polynomial: its kernels, which are the same for all machines, and its terms."""

from __future__ import annotations

import functools

from eqaccel.codegen import COMMON, Direction, check, family_prelude, pack
from eqaccel.families.polynomial.body import print_polynomial
from eqaccel.families.polynomial.reference import execute_polynomial
from eqaccel.families.polynomial.spec import MAX_POWER, PolynomialSpec

NAME = "polynomial"
"""Of the family."""

_ROW_THREADS = 128  # of a GPU block; each takes rows of its own, so results do not depend on it


@functools.lru_cache(maxsize=64)
def polynomial_payload(spec: PolynomialSpec) -> tuple[bytes, int]:
    """The payload of a polynomial, and the integer key that names it.

    Meta has `row_threads`, the threads of a GPU block, of which each takes a row; entry `terms` has a line "<output>
    <weight> <feature> <feature> <feature> <coefficient>" for each term, with num_features for a feature that is not
    there.
    """
    entries = {f"prelude/{backend}": polynomial_prelude(backend) for backend in ("cpu", "cuda", "hip")}
    x, w, z = spec.num_features, spec.num_weights, spec.num_outputs
    entries["check/blocks"] = f"x 1 {x}\nw 1 {w}\nz 1 {z}\n"
    for direction in COMMON:
        body = print_polynomial(spec, direction)
        entries[f"cpu/{direction.value}"] = body
        entries[f"gpu/{direction.value}/float32"] = entries[f"gpu/{direction.value}/float64"] = body
        for name in (f"cpu/{direction.value}", f"gpu/{direction.value}/float32", f"gpu/{direction.value}/float64"):
            entries[f"plan/{name}"] = explain(spec, direction)
        entries[f"check/{direction.value}"] = _checksums(spec, direction)
    padding = (x,) * MAX_POWER
    lines = (((t.output, t.weight, *(t.features + padding)[:MAX_POWER]), t.coefficient) for t in spec.terms)
    entries["terms"] = "".join(" ".join(map(str, numbers)) + f" {c!r}\n" for numbers, c in lines)
    return pack(NAME, {"x_dim": x, "y_dim": 0, "w_dim": w, "z_dim": z, "row_threads": _ROW_THREADS}, entries)


def polynomial_prelude(backend: str) -> str:
    """The text in front of every body of a backend."""
    return family_prelude("polynomial", backend, __package__)


def explain(spec: PolynomialSpec, direction: Direction) -> str:
    """How the kernel of a direction works, in words."""
    return (
        f"{direction.value} of polynomials: {spec.num_outputs} outputs of {spec.num_features} features and "
        f"{spec.num_weights} weights, {len(spec.terms)} terms\n  a lane of a SIMD vector, or a thread of a GPU, takes "
        f"a row; blocks of {_ROW_THREADS} threads\n"
    )


def _checksums(spec: PolynomialSpec, direction: Direction) -> str:
    """What the self-check (`codegen.check`) compares a batch with."""
    widths = {"x": spec.num_features, "w": spec.num_weights, "gz": spec.num_outputs}
    widths |= {"a": spec.num_features, "c": spec.num_weights}
    operands = check.batch_operands(direction, widths)
    return check.checksums(
        direction, lambda absolute: execute_polynomial(spec, direction, **operands, absolute=absolute)
    )

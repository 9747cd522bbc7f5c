"""The payload of matrix products: one kernel for all of them, on the only architecture that has its instructions."""

from __future__ import annotations

import functools

from eqaccel.codegen import flatten_prelude, pack
from eqaccel.families.matrix_product.body import DEPTH, HEIGHT, STAGES, THREADS, WIDTHS, print_products, shared_bytes

NAME = "matrix_product"
"""Of the family."""


@functools.cache
def matrix_payload() -> tuple[bytes, int]:
    """The payload of the kernel, and the integer key that names it.

    `csrc/runtime/matrix_product.h` says what entry `gpu/forward/float32` is compiled for. Meta has the numbers of the
    launches: `height`, `depth` and `threads`, of `widths` tiles `<n>/width` and `<n>/shared_bytes`.
    """
    numbers = {"height": HEIGHT, "depth": DEPTH, "threads": THREADS, "widths": len(WIDTHS)}
    for n, width in enumerate(WIDTHS):
        numbers[f"{n}/width"] = width
        numbers[f"{n}/shared_bytes"] = shared_bytes(width)
    body = "gpu/forward/float32"
    return pack(NAME, numbers, {"prelude/cuda": matrix_prelude(), body: print_products(), f"plan/{body}": explain()})


def matrix_prelude() -> str:
    """The text in front of the body; there is one for CUDA alone."""
    return flatten_prelude("matrix_product.h", "cuda", __package__)


def explain() -> str:
    """How the kernel works, in words."""
    return (
        f"product of matrices, 32-bit\n  tiles of {HEIGHT} rows and {', '.join(map(str, WIDTHS))} columns, "
        f"{STAGES} stages of {DEPTH} terms, blocks of {THREADS} threads\n"
    )

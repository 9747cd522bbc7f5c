"""The payload of matrix products: a kernel for CPUs, and one for the only GPUs that have its instructions."""

from __future__ import annotations

import functools

import numpy as np

from eqaccel.codegen import check, flatten_prelude, pack
from eqaccel.families.matrix_product.body import (
    DEPTH,
    STAGES,
    THREADS,
    TILINGS,
    WIDTHS,
    print_host_product,
    print_products,
)

NAME = "matrix_product"
"""Of the family."""

_CHECKED_COLUMNS = 75
"""Columns of the product that a CPU kernel is checked with: panels of any SIMD width, and a part of one."""


@functools.cache
def matrix_payload() -> tuple[bytes, int]:
    """The payload of the kernels, and the integer key that names it.

    `csrc/runtime/matrix_product.h` says what entry `gpu/forward/float32` is compiled for. Meta has the numbers of its
    launches: `depth` and `threads`; of `tilings` kernels, `eq_product_<n>`, how they divide the output: `<n>/width`,
    `<n>/height`, `<n>/kept_terms` (of B that a block keeps; 0 where it keeps none), `<n>/adds_rows` (1 where rows are
    sums of two rows) and `<n>/shared_bytes`. The CPU kernel computes z = x w, where operands have any sizes; in meta
    and the self-check stand those of the latter.
    """
    numbers = {"depth": DEPTH, "threads": THREADS, "tilings": len(TILINGS)}
    for n, tiling in enumerate(TILINGS):
        numbers[f"{n}/width"] = tiling.width
        numbers[f"{n}/height"] = tiling.height
        numbers[f"{n}/kept_terms"] = tiling.kept_terms
        numbers[f"{n}/adds_rows"] = int(tiling.adds_rows)
        numbers[f"{n}/shared_bytes"] = tiling.shared_bytes
    terms = check.PROBLEM["batch_rows"]  # as many as w has rows
    numbers |= {"x_dim": terms, "y_dim": 0, "w_dim": _CHECKED_COLUMNS, "z_dim": _CHECKED_COLUMNS}
    entries = {f"prelude/{backend}": matrix_prelude(backend) for backend in ("cpu", "cuda")}
    for body, text in (("cpu/forward", print_host_product()), ("gpu/forward/float32", print_products())):
        entries[body], entries[f"plan/{body}"] = text, explain(body.split("/")[0])
    entries["check/blocks"] = f"x {terms} 1\nw {_CHECKED_COLUMNS} 1\nz {_CHECKED_COLUMNS} 1\n"
    entries["check/forward"] = _checksums(terms)
    return pack(NAME, numbers, entries)


def matrix_prelude(backend: str) -> str:
    """The text in front of the body; of GPUs those of CUDA have one."""
    return flatten_prelude("cpu_matrix_product.h" if backend == "cpu" else "matrix_product.h", backend, __package__)


def explain(backend: str) -> str:
    """How the kernel works, in words."""
    if backend == "cpu":
        return "product of matrices\n  columns packed into panels of two SIMD vectors, as many rows as registers hold\n"
    return (
        f"product of matrices, 32-bit\n  tiles of {', '.join(map(str, WIDTHS))} columns, "
        f"{STAGES} stages of {DEPTH} terms, blocks of {THREADS} threads\n"
    )


def _checksums(terms: int) -> str:
    """What the self-check (`codegen.check`) compares a product with."""
    x = check.numbers("x", check.PROBLEM["batch_rows"], terms)
    w = check.numbers("w", terms, _CHECKED_COLUMNS)
    size = float(np.sqrt(((np.abs(x) @ np.abs(w)) ** 2).sum()))
    a, b = (float(products.sum()) for products in check.projections(x @ w))
    return f"z {size:.4g} {a!r} {b!r}\n"

"""The body for tensor cores of other compute capabilities than 9.0, on `mma_product.h`."""

from __future__ import annotations

import functools

from eqaccel.families.matrix_product.body import DEPTH, GpuBody, Tiling, print_numbers
from eqaccel.families.matrix_product.spec import MatrixProductSpec

_WIDTH = 64
"""Columns of a tile, all of which a warp has: 64 sums a thread, 32 pairs of halves of a stage of A, and 32 for 16
columns."""
_THREADS = 128
_ROWS_OF_WARP = 32
_RESIDENT = 2
"""Blocks of a multiprocessor, so that one multiplies while the other waits for copies. On an A100 at its peak they copy
21 bytes a cycle from the L2 cache, half of what that gives."""
_STAGES = 3
"""As many as two blocks have room for in the 164 KiB of a multiprocessor of an A100."""


@functools.cache
def mma_body(spec: MatrixProductSpec) -> GpuBody:
    """The body of a spec."""
    height = _THREADS // 32 * _ROWS_OF_WARP
    numbers = print_numbers(
        parts=spec.parts, depth=DEPTH, stages=_STAGES, width=_WIDTH, block_threads=_THREADS, resident=_RESIDENT
    )
    text = f"""namespace {{
struct Problem {{
{numbers}}};
}}  // namespace
EQ_EXPORT_PACK(Problem, MmaProduct<Problem>::Order)
EQ_EXPORT_MMA_PRODUCT(eq_product_0, Problem)
"""
    shared_bytes = _STAGES * DEPTH * (4 * height + 2 * spec.parts * _WIDTH)
    return GpuBody(text, _THREADS, (Tiling(_WIDTH, height, _STAGES, shared_bytes),), "mma.sync")

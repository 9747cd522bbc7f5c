"""Numbers of the self-check of CPU kernels: compilers have faults, and a wrong kernel must not be used.

The runtime runs every CPU kernel that it has just compiled on a small problem, which it makes itself
(`csrc/runtime/self_check.cpp`), and compares its outputs with checksums. They come from the family's reference
executor, in float64, and are written into the payload, so that a model is checked on any machine and without Python.

The problem's numbers lie between 1 and 2 in size, in steps of 1/128, so they are exact in every dtype. A checksum is
the sum of a block of an output times such numbers: another value in one element changes it, and so do two elements that
are swapped.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

BATCH_ROWS = 19
"""Rows of every operand where there are no edge attributes, and so no graph: more than a SIMD vector holds."""

OPERANDS = ("x", "y", "w", "gz", "a", "b", "c")
"""Of any kernel; the position is the number of a sequence of random numbers."""

_PROJECTIONS = (7, 8)


def numbers(name: str, rows: int, columns: int) -> NDArray:
    """The numbers that the runtime makes for an operand of the problem."""
    return _numbers(OPERANDS.index(name), rows, columns)


def projections(values: NDArray) -> list[NDArray]:
    """An output times the numbers of each projection, to be added up."""
    return [_numbers(sequence, *values.shape) * values for sequence in _PROJECTIONS]


@functools.lru_cache(maxsize=16)
def _numbers(sequence: int, rows: int, columns: int) -> NDArray:
    """Numbers from a hash of their position (lowbias32, https://github.com/skeeto/hash-prospector)."""
    n = np.arange(rows * columns, dtype=np.uint32) + np.uint32(sequence << 24)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        n ^= n >> np.uint32(shift)
        n *= np.uint32(factor)
    n ^= n >> np.uint32(16)
    magnitude = (128.0 + (n & np.uint32(127))) / 128.0
    numbers = np.where(n & np.uint32(128), -magnitude, magnitude).reshape(rows, columns)
    numbers.flags.writeable = False  # kept for the other directions
    return numbers

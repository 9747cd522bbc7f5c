"""Numbers of the self-check of CPU kernels: compilers have faults, and a wrong kernel must not be used.

The runtime runs every CPU kernel that it has just compiled on a small problem of its own (`csrc/runtime/self_check.h`),
and compares its outputs with checksums. They come from the family's reference executor, in float64, and are written
into the payload, so that a model is checked on any machine and without Python.

A checksum is the sum of a block of an output times numbers like those of the problem: another value in one element
changes it, and so do two elements that are swapped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eqaccel import _runtime
from eqaccel.codegen.direction import OUTPUTS, Direction, Result

PROBLEM = _runtime.self_check_problem()
"""Edges and numbers of rows of the problem; `batch_rows` where there are no edge attributes, and so no graph."""

SEQUENCES = dict(zip(("x", "y", "w", "gz", "a", "b", "c", "p", "q", "r", "g"), (*range(7), *range(9, 13)), strict=True))
"""The operands of any kernel, those that forward kernels read first, with the numbers of their sequences of random
numbers; projections have those between."""


def operands_of(direction: Direction) -> tuple[str, ...]:
    """The operands that a direction reads."""
    return tuple(SEQUENCES)[: (3, 4, 7, 11)[direction.order]]


def numbers(name: str, rows: int, columns: int) -> NDArray:
    """The numbers that the runtime makes for an operand of the problem."""
    return _numbers(SEQUENCES[name], rows, columns)


def batch_operands(direction: Direction, widths: Mapping[str, int]) -> dict[str, Any]:
    """The operands that a direction reads, of a problem without a graph; `widths` has the columns of all."""
    read = operands_of(direction)
    return {name: numbers(name, PROBLEM["batch_rows"], width) for name, width in widths.items() if name in read}


def checksums(direction: Direction, execute: Callable[..., Result]) -> str:
    """What the runtime compares outputs of a batch with: a line "<output> <size> <projection> <projection>" for each.

    The size is the root of the sum of squares of the sums of absolute values that the elements consist of.

    Args:
        direction: The direction.
        execute: Runs it on the operands of the problem; under `absolute` adds up the absolute values of all terms.
    """
    result, absolute = execute(absolute=False), execute(absolute=True)
    lines = []
    for name in OUTPUTS[direction]:
        value = getattr(result, name)
        if value is not None and value.size:
            size = float(np.sqrt((getattr(absolute, name) ** 2).sum()))
            a, b = (float(products.sum()) for products in projections(value))
            lines.append(f"{name} {size:.4g} {a!r} {b!r}\n")
    return "".join(lines)


def projections(values: NDArray) -> list[NDArray]:
    """An output times the numbers of each projection, to be added up."""
    return [_numbers(sequence, *values.shape) * values for sequence in PROBLEM["projections"]]


@functools.lru_cache(maxsize=16)
def _numbers(sequence: int, rows: int, columns: int) -> NDArray:
    numbers = _runtime.self_check_numbers(sequence, rows * columns).reshape(rows, columns)
    numbers.flags.writeable = False  # kept for the other directions
    return numbers

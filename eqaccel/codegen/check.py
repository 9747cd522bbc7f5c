"""Figures for the self-check of CPU kernels: compilers have faults, and a wrong kernel must not be used.

The runtime runs every CPU kernel that it has just compiled on a small problem of its own (`csrc/runtime/self_check.h`),
and compares its outputs with these checksums. They come from the reference executor, in float64, and are written into
the payload, so that a model is checked on any machine and without Python.

A figure is the sum of a block of an output times numbers like those of the problem: another value in one element
changes it, and so do two elements that are swapped.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from eqaccel import _runtime
from eqaccel.plan import Direction, Plan, execute
from eqaccel.spec import TensorProductSpec

_PROBLEM = _runtime.self_check_problem()
RECEIVER, SENDER = np.array(_PROBLEM["receiver"]), np.array(_PROBLEM["sender"])
_ROWS = {"x": _PROBLEM["num_senders"], "y": len(RECEIVER), "z": _PROBLEM["num_receivers"], "w": len(RECEIVER)}
BATCH_ROWS: int = _PROBLEM["batch_rows"]
"""Rows of every operand where there are no edge attributes, and so no graph: more than a SIMD vector holds."""

_OPERANDS = ("x", "y", "w", "gz", "a", "b", "c")  # the position is the number of a sequence of random numbers
_KINDS = dict(zip(_OPERANDS, "xywzxyw", strict=True)) | {"z": "z", "gx": "x", "gy": "y", "gw": "w"}

OUTPUTS = {
    Direction.FORWARD: ("z",),
    Direction.BACKWARD: ("gx", "gy", "gw"),
    Direction.DOUBLE_BACKWARD: ("z", "gx", "gy", "gw"),
}
"""What each direction writes, in the order of its checksums."""


def problem(spec: TensorProductSpec, direction: Direction) -> dict[str, NDArray]:
    """The arguments of `execute` for the problem, in the (2l+1, mul) layout."""
    count = {Direction.FORWARD: 3, Direction.BACKWARD: 4, Direction.DOUBLE_BACKWARD: 7}[direction]
    dims = {"x": spec.x_dim, "y": spec.y_dim, "z": spec.z_dim, "w": spec.weight_numel}
    return {
        name: _numbers(sequence, _ROWS[_KINDS[name]], dims[_KINDS[name]])
        for sequence, name in enumerate(_OPERANDS[:count])
    }


def blocks(spec: TensorProductSpec) -> str:
    """A line "<x, y, z or w> <channels> <components>" for each block of a row, in the order of the row."""
    return "".join(f"{kind} {channels} {components}\n" for kind, channels, components in _blocks(spec))


def checksums(plan: Plan) -> str:
    """A line "<output> <size> <projection> <projection>" for each block of each output of a plan's direction.

    The size is the root of the sum of squares of the sums of absolute values that the elements of the block consist of.
    """
    operands = problem(plan.spec, plan.direction)
    graph = {"receiver": RECEIVER, "sender": SENDER, "num_receivers": _ROWS["z"]}
    result, absolute = (execute(plan, **operands, **graph, absolute=flag) for flag in (False, True))
    lines = []
    for name in OUTPUTS[plan.direction]:
        sizes = np.sqrt(_sum_blocks(plan.spec, name, getattr(absolute, name) ** 2)).tolist()
        projections = project(plan.spec, name, getattr(result, name)).tolist()
        lines += [f"{name} {size:.4g} {a!r} {b!r}\n" for size, (a, b) in zip(sizes, projections, strict=True)]
    return "".join(lines)


def project(spec: TensorProductSpec, name: str, values: NDArray) -> NDArray:
    """The projections, (blocks, 2), of an output ("z", "gx", "gy" or "gw") in the (2l+1, mul) layout."""
    return np.stack([_sum_blocks(spec, name, product) for product in projections(values)], axis=1)


def projections(values: NDArray) -> list[NDArray]:
    """An output times the numbers of each projection, to be added up."""
    return [_numbers(sequence, *values.shape) * values for sequence in _PROBLEM["projections"]]


def numbers(name: str, rows: int, columns: int) -> NDArray:
    """The numbers that the runtime makes for an operand of the problem."""
    return _numbers(_OPERANDS.index(name), rows, columns)


def _blocks(spec: TensorProductSpec) -> list[tuple[str, int, int]]:
    rows = [("x", block.mul, block.ir.dim) for block in spec.irreps_in1]
    rows += [("y", 1, block.dim) for block in spec.irreps_in2]
    rows += [("z", block.mul, block.ir.dim) for block in spec.irreps_out]
    rows += [("w", path.mul, 1) for path in spec.paths if path.weight_offset is not None]
    return [row for row in rows if row[1] * row[2] > 0]


def _sum_blocks(spec: TensorProductSpec, name: str, values: NDArray) -> NDArray:
    widths = [channels * components for kind, channels, components in _blocks(spec) if kind == _KINDS[name]]
    return np.add.reduceat(values.sum(0), np.cumsum([0, *widths])[:-1])


@functools.lru_cache(maxsize=16)
def _numbers(sequence: int, rows: int, columns: int) -> NDArray:
    numbers = _runtime.self_check_numbers(sequence, rows * columns).reshape(rows, columns)
    numbers.flags.writeable = False  # kept for the other directions
    return numbers

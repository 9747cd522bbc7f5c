"""The self-check of tensor products (see `codegen.check`): a small graph, and what right kernels give on it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eqaccel.codegen import OUTPUTS, Direction
from eqaccel.codegen.check import PROBLEM, SEQUENCES, numbers, operands_of, projections
from eqaccel.families.tensor_product.generators import AnyPlan, generator
from eqaccel.families.tensor_product.spec import TensorProductSpec

RECEIVER, SENDER = np.array(PROBLEM["receiver"]), np.array(PROBLEM["sender"])
_ROWS = {"x": PROBLEM["num_senders"], "y": len(RECEIVER), "z": PROBLEM["num_receivers"], "w": len(RECEIVER)}
_BATCH_ROWS = dict.fromkeys("xyz", PROBLEM["batch_rows"]) | {"w": 1}
_KINDS = dict(zip(SEQUENCES, "xywzxywxywz", strict=True)) | {"z": "z", "gx": "x", "gy": "y", "gw": "w"}
_KINDS |= {"ga": "x", "gb": "y", "gc": "w"}


def problem(spec: TensorProductSpec, direction: Direction, *, summed: bool = False) -> dict[str, NDArray]:
    """The operands of `execute` for the problem, in the (2l+1, mul) layout.

    Args:
        spec: The product.
        direction: The direction.
        summed: Whether it is that of a batch whose rows share their weights.
    """
    dims = {"x": spec.x_dim, "y": spec.y_dim, "z": spec.z_dim, "w": spec.weight_numel}
    rows = _BATCH_ROWS if summed else _ROWS
    return {name: numbers(name, rows[_KINDS[name]], dims[_KINDS[name]]) for name in operands_of(direction)}


def blocks(spec: TensorProductSpec) -> str:
    """A line "<x, y, z or w> <channels> <components>" for each block of a row, in the order of the row."""
    return "".join(f"{kind} {channels} {components}\n" for kind, channels, components in _blocks(spec))


def checksums(plan: AnyPlan, *, summed: bool = False) -> str:
    """A line "<output> <size> <projection> <projection>" for each block of each output of a plan's direction.

    The size is the root of the sum of squares of the sums of absolute values that the elements of the block consist of.

    Args:
        plan: The plan.
        summed: As for `problem`; then the gradient of the weights is one row, too.
    """
    operands = problem(plan.spec, plan.direction, summed=summed)
    graph = {} if summed else {"receiver": RECEIVER, "sender": SENDER, "num_receivers": _ROWS["z"]}
    execute = generator(plan.spec).execute
    results = [execute(plan, **operands, **graph, absolute=flag) for flag in (False, True)]
    lines = []
    for name in OUTPUTS[plan.direction]:
        of_weights = summed and _KINDS[name] == "w"
        rows = (getattr(result, name) for result in results)
        value, absolute = (each.sum(0, keepdims=True) if of_weights else each for each in rows)
        sizes = np.sqrt(_sum_blocks(plan.spec, name, absolute**2)).tolist()
        projected = project(plan.spec, name, value).tolist()
        lines += [f"{name} {size:.4g} {a!r} {b!r}\n" for size, (a, b) in zip(sizes, projected, strict=True)]
    return "".join(lines)


def project(spec: TensorProductSpec, name: str, values: NDArray) -> NDArray:
    """The projections, (blocks, 2), of an output ("z", "gx", ...) in the (2l+1, mul) layout."""
    return np.stack([_sum_blocks(spec, name, product) for product in projections(values)], axis=1)


def _blocks(spec: TensorProductSpec) -> list[tuple[str, int, int]]:
    rows = [("x", block.mul, block.ir.dim) for block in spec.irreps_in1]
    rows += [("y", 1, block.dim) for block in spec.irreps_in2]
    rows += [("z", block.mul, block.ir.dim) for block in spec.irreps_out]
    rows += [("w", path.weight_numel, 1) for path in spec.paths if path.weight_offset is not None]
    return [row for row in rows if row[1] * row[2] > 0]


def _sum_blocks(spec: TensorProductSpec, name: str, values: NDArray) -> NDArray:
    widths = [channels * components for kind, channels, components in _blocks(spec) if kind == _KINDS[name]]
    return np.add.reduceat(values.sum(0), np.cumsum([0, *widths])[:-1])

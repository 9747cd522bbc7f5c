"""The text of GPU kernels of linear maps, on a CPU: its numbers, and that it touches nothing beyond its operands."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
from guarded import guarded
from hosts import gpu_kernels
from numpy.typing import NDArray

from eqaccel import LinearSpec, families
from eqaccel.codegen import Direction
from eqaccel.families.linear import LinearPath, execute_linear
from eqaccel.families.linear.body import print_linear
from eqaccel.families.linear.plan import SHAPES, kernel_name, make_plan
from eqaccel.families.linear.weights import make_weights_plan, print_weights
from eqaccel.testing import ERROR_CONSTANT

FAMILY = Path(families.__file__).parent / "linear"
SCALARS = {"float": np.float32, "double": np.float64}
SPEC = LinearSpec("8x0e+5x1o", "8x0e+6x1o", (LinearPath(0, 0, 0.5), LinearPath(1, 1, -1.5)), 3)
"""Its last weights, of the last attribute, are read in whole vectors."""

pytestmark = pytest.mark.parametrize("scalar", SCALARS)


def _operands(rows: int, dtype: np.dtype) -> dict[str, NDArray]:
    """Rows have an attribute each, none, and two."""
    draw, y = np.random.default_rng(3), np.eye(3)[np.arange(rows) % 3]
    y[[4, 9]] = 0.0
    y[7] = (0.0, 2.0, -1.0)
    arrays = {"x": draw.normal(size=(rows, SPEC.irreps_in.dim)), "y": y, "w": draw.normal(size=SPEC.weight_numel)}
    arrays["gz"] = draw.normal(size=(rows, SPEC.irreps_out.dim))
    return {name: guarded(array.astype(dtype)) for name, array in arrays.items()}


def _places(*arrays: NDArray) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(array.ctypes.data) for array in arrays]


def _assert_right(found: NDArray, output: str, operands: dict[str, NDArray]) -> None:
    exact = {name: array.astype(np.float64) for name, array in operands.items()}
    direction = Direction.FORWARD if output == "z" else Direction.BACKWARD
    if direction is Direction.FORWARD:
        del exact["gz"]
    expected, size = (getattr(execute_linear(SPEC, direction, **exact, absolute=a), output) for a in (False, True))
    assert (np.abs(found - expected) <= ERROR_CONSTANT * np.finfo(found.dtype).eps * size).all()


@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.BACKWARD])
def test_rows(direction: Direction, scalar: str, tmp_path: Path) -> None:
    rows, dtype, plan = 13, np.dtype(SCALARS[scalar]), make_plan(SPEC, direction)
    operands, output = _operands(rows, dtype), "z" if direction is Direction.FORWARD else "gx"
    words = {"SCALAR": scalar, "DIRECTION": int(direction is Direction.BACKWARD)}
    for number, shape in enumerate(SHAPES[dtype.itemsize]):
        body = print_linear(plan, dtype.itemsize)
        kernel = gpu_kernels("linear.cpp", tmp_path, body, FAMILY, LINEAR=kernel_name(number), **words)
        tiles = {tile.components: tile for tile in plan.tiles(shape)}
        of_outputs = [(tiles[o.components], o.mul) for o in plan.outputs]
        blocks = sum(-(-rows // tile.block_rows) * -(-mul // tile.block_columns) for tile, mul in of_outputs)
        dims = {"z": SPEC.irreps_out.dim, "gx": SPEC.irreps_in.dim}
        results = {name: guarded(np.full((rows, dim), np.nan, dtype)) for name, dim in dims.items()}
        kernel.run(*_places(*operands.values(), *results.values()), rows, blocks, shape.threads)
        _assert_right(results[output], output, operands)


@pytest.mark.parametrize("parts", [1, 3])
def test_weights(parts: int, scalar: str, tmp_path: Path) -> None:
    rows, dtype, plan = 45, np.dtype(SCALARS[scalar]), make_weights_plan(SPEC)
    operands = _operands(rows, dtype)
    kernel = gpu_kernels("linear_weights.cpp", tmp_path, print_weights(plan), FAMILY, SCALAR=scalar, DIRECTION=2)
    gw = guarded(np.full(SPEC.weight_numel, np.nan, dtype))
    sums = guarded(np.full((parts, SPEC.weight_numel), np.nan, dtype))
    given = _places(*(operands[name] for name in ("x", "y", "gz")), gw, sums)
    kernel.run(*given, rows, plan.squares, parts)
    _assert_right(gw, "gw", operands)

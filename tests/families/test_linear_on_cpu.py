"""The text of GPU kernels of linear maps, on a CPU: its numbers, and that it touches nothing beyond its operands."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import numpy as np
import pytest
from folders import SUPPORT
from guarded import guarded
from hosts import compile_cpp

from eqaccel import LinearSpec, families
from eqaccel.codegen import Direction, preludes
from eqaccel.families.linear import LinearPath, execute_linear
from eqaccel.families.linear.body import print_linear
from eqaccel.families.linear.plan import SHAPES, kernel_name, make_plan
from eqaccel.testing import ERROR_CONSTANT

SCALARS = {"float": np.float32, "double": np.float64}
ROWS = 13
SPEC = LinearSpec("8x0e+5x1o", "8x0e+6x1o", (LinearPath(0, 0, 0.5), LinearPath(1, 1, -1.5)), 3)
"""Its last weights, of the last attribute, are read in whole vectors."""


def _attributes() -> np.ndarray:
    """One each, none, and two."""
    y = np.eye(3)[np.arange(ROWS) % 3]
    y[[4, 9]] = 0.0
    y[7] = (0.0, 2.0, -1.0)
    return y


@pytest.mark.parametrize("scalar", SCALARS)
@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.BACKWARD])
def test_kernels_on_a_cpu(direction: Direction, scalar: str, tmp_path: Path) -> None:
    dtype, draw = np.dtype(SCALARS[scalar]), np.random.default_rng(3)
    x_dim, z_dim = SPEC.irreps_in.dim, SPEC.irreps_out.dim
    operands = {"x": draw.normal(size=(ROWS, x_dim)), "y": _attributes(), "w": draw.normal(size=SPEC.weight_numel)}
    if direction is Direction.BACKWARD:
        operands["gz"] = draw.normal(size=(ROWS, z_dim))
    operands = {name: guarded(values.astype(dtype)) for name, values in operands.items()}
    exact = {name: values.astype(np.float64) for name, values in operands.items()}
    output = "z" if direction is Direction.FORWARD else "gx"
    expected, size = (getattr(execute_linear(SPEC, direction, **exact, absolute=a), output) for a in (False, True))

    plan, host = make_plan(SPEC, direction), SUPPORT / "gpu_on_cpu"
    for file in (*Path(preludes.__file__).parent.glob("*.h"), *(Path(families.__file__).parent / "linear").glob("*.h")):
        if not (host / file.name).exists():
            shutil.copy(file, tmp_path)
    (tmp_path / "body.h").write_text(print_linear(plan, dtype.itemsize))
    for number, shape in enumerate(SHAPES[dtype.itemsize]):
        library = tmp_path / f"{number}.so"
        options = [
            "-std=c++20",
            "-O1",
            "-shared",
            "-fPIC",
            f"-DEQ_SCALAR={scalar}",
            f"-DEQ_LINEAR={kernel_name(number)}",
        ]
        options += [f"-DEQ_DIRECTION={int(direction is Direction.BACKWARD)}", f"-I{tmp_path}", f"-I{host}"]
        compile_cpp(*options, host / "linear.cpp", "-o", library)
        tiles = {tile.components: tile for tile in plan.tiles(shape)}
        of_outputs = [(tiles[o.components], o.mul) for o in plan.outputs]
        blocks = sum(-(-ROWS // t.block_rows) * -(-mul // t.block_columns) for t, mul in of_outputs)
        results = {name: guarded(np.full((ROWS, dim), np.nan, dtype)) for name, dim in (("z", z_dim), ("gx", x_dim))}
        given = [operands.get(name, results.get(name)) for name in ("x", "y", "w", "gz", "z", "gx")]
        places = [None if array is None else ctypes.c_void_p(array.ctypes.data) for array in given]
        ctypes.CDLL(str(library)).run(*places, ROWS, blocks, shape.threads)
        assert (np.abs(results[output] - expected) <= ERROR_CONSTANT * np.finfo(dtype).eps * size).all(), number

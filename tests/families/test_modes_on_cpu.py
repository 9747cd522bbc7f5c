"""The text of GPU kernels for products of any mode, on a CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from guarded import guarded
from hosts import gpu_kernels
from mode_cases import CASES
from numpy.typing import NDArray

from eqaccel import TensorProductSpec
from eqaccel.codegen import COMMON, OUTPUTS, Direction
from eqaccel.families.tensor_product import TENSOR_PRODUCT
from eqaccel.families.tensor_product.pairs import WeightCopies, plan_pairs
from eqaccel.families.tensor_product.pairs.body import print_code, print_launch
from eqaccel.families.tensor_product.reference import to_ir_mul, to_mul_ir
from eqaccel.targets import TARGETS
from eqaccel.testing import ERROR_CONSTANT

_DOUBLE, _FLOAT = ("double", np.float64), ("float", np.float32)
_SCALARS = {"chunks": _DOUBLE, "few channels": _FLOAT, "modes": _FLOAT}
_SCALARS |= {"own channels": _FLOAT, "few own channels": _DOUBLE, "shared own channels": _FLOAT}
_READ = {
    Direction.FORWARD: ("x", "y", "w"),
    Direction.BACKWARD: ("x", "y", "w", "gz"),
    Direction.DOUBLE_BACKWARD: ("x", "y", "w", "gz", "a", "b", "c"),
}


def _library(name: str, direction: Direction, folder: Path) -> ctypes.CDLL:
    """The kernel of a case, for a GPU with an engine for copies."""
    scalar, dtype = _SCALARS[name]
    plan = plan_pairs(TensorProductSpec(*CASES[name]), direction, TARGETS["sm_90"], np.dtype(dtype).itemsize)
    few = WeightCopies.ROWS if direction is Direction.FORWARD else WeightCopies.NONE
    copies = {"modes": few, "chunks": WeightCopies.CHUNKS, "few channels": WeightCopies.CHUNKS}
    assert plan.weight_copies is copies.get(name, WeightCopies.NONE)
    assert plan.stores_z == (name == "own channels" and direction is not Direction.BACKWARD)
    body = print_launch(plan) + print_code(plan)
    return gpu_kernels("pair_product.cpp", folder, body, SCALAR=scalar, DIRECTION=COMMON.index(direction))


@dataclass(frozen=True)
class Call:
    """What a kernel is called with: arrays as the reference takes them, of the rows of a batch or of edges.

    Attributes:
        sender: Of each edge; of a batch, its row.
        receiver: Likewise.
        receivers: How many there are.
        is_graph: Whether there are edges.
        part: How many edges a block of the GPU has, about so many of a graph; 0 for those of a receiver.
        mul_ir: Whether rows are laid out as in e3nn, (mul, 2l+1); the reference has (2l+1, mul).
        late: Whether copies in the background are made when they are waited for, and not before.
    """

    spec: TensorProductSpec
    arrays: dict[str, NDArray]
    sender: NDArray
    receiver: NDArray
    receivers: int
    is_graph: bool
    part: int
    mul_ir: bool
    late: bool

    def laid_out(self, name: str, rows: NDArray, convert: Callable[..., NDArray]) -> NDArray:
        """Rows in another layout, if it is asked for and they have one."""
        irreps = {"x": self.spec.irreps_in1, "a": self.spec.irreps_in1, "gx": self.spec.irreps_in1}
        irreps |= {"z": self.spec.irreps_out, "gz": self.spec.irreps_out}
        return np.ascontiguousarray(convert(irreps[name], rows)) if self.mul_ir and name in irreps else rows

    def run(self, kernel: ctypes.CDLL) -> dict[str, NDArray]:
        """All results; gradients of x of a graph, which are kept edge by edge, are added up here."""
        spec, edges, senders = self.spec, len(self.sender), len(self.arrays["x"])
        shapes = {"z": (self.receivers, spec.z_dim), "gx": (edges, spec.x_dim)}
        shapes |= {"gy": (edges, spec.y_dim), "gw": (edges, spec.weight_numel)}
        results = {name: guarded(np.full(shape, np.nan, self.arrays["x"].dtype)) for name, shape in shapes.items()}
        given = {name: guarded(self.laid_out(name, array, to_mul_ir)) for name, array in self.arrays.items()}
        order = np.lexsort((self.sender, self.receiver))
        row_ptr = np.searchsorted(self.receiver[order], np.arange(self.receivers + 1))
        index = [guarded(numbers.astype(np.int32)) for numbers in (row_ptr, order, self.sender[order])]
        places = (
            _places([given.get(name) for name in ("x", "y", "w", "gz", "a", "b", "c")]),
            _places(list(results.values())),
            _places(index if self.is_graph else [None] * 3),
        )
        flags = ctypes.c_bool(self.mul_ir), ctypes.c_bool(self.late)
        assert kernel.run(*places, self.receivers, senders, edges, self.part, *flags) == 0
        found = {name: self.laid_out(name, rows, to_ir_mul) for name, rows in results.items()}
        if self.is_graph:
            of_edges, found["gx"] = found["gx"], np.zeros((senders, spec.x_dim))
            np.add.at(found["gx"], self.sender[order], of_edges)
        return found


def _places(arrays: list[NDArray | None]) -> ctypes.Array:
    return (ctypes.c_void_p * len(arrays))(*(None if array is None else array.ctypes.data for array in arrays))


@pytest.mark.parametrize("direction", COMMON)
@pytest.mark.parametrize("name", _SCALARS)
def test_kernels_on_a_cpu(name: str, direction: Direction, tmp_path: Path) -> None:
    """Each number is where it is looked for, whether copies come as soon or as late as they may."""
    kernel, spec, dtype = _library(name, direction, tmp_path), TensorProductSpec(*CASES[name]), _SCALARS[name][1]
    draw = np.random.default_rng(len(name))
    columns = {"x": spec.x_dim, "y": spec.y_dim, "w": spec.weight_numel, "gz": spec.z_dim}
    columns |= {"a": spec.x_dim, "b": spec.y_dim, "c": spec.weight_numel}
    batch = np.arange(5), np.arange(5)  # the last block has one
    graph = draw.integers(6, size=13), draw.choice([0, 2, 3], size=13)  # one receiver has none
    for is_graph, (sender, receiver), senders, receivers in ((False, batch, 5, 5), (True, graph, 6, 4)):
        rows = dict.fromkeys(columns, len(sender)) | {"x": senders, "a": senders, "gz": receivers}
        arrays = {key: draw.standard_normal((rows[key], columns[key])).astype(dtype) for key in _READ[direction]}
        exact = {key: array.astype(np.float64) for key, array in arrays.items()}
        exact |= {"sender": sender, "receiver": receiver, "num_receivers": receivers}
        expected = TENSOR_PRODUCT.reference(spec, direction, **exact)
        size = TENSOR_PRODUCT.reference(spec, direction, absolute=True, **exact)
        for part, mul_ir, late in product((0, 3) if is_graph else (2,), (True, False), (True, False)):
            found = Call(spec, arrays, sender, receiver, receivers, is_graph, part, mul_ir, late).run(kernel)
            for output in OUTPUTS[direction]:
                error = np.abs(found[output] - getattr(expected, output))
                assert (error <= ERROR_CONSTANT * np.finfo(dtype).eps * getattr(size, output)).all(), output

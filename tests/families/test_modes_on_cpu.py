"""The text of GPU kernels for products of any mode, on threads of a CPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from folders import SUPPORT
from mode_cases import CASES
from numpy.typing import NDArray

from eqaccel import TensorProductSpec
from eqaccel.codegen import COMMON, OUTPUTS, Direction, preludes
from eqaccel.families.tensor_product import TENSOR_PRODUCT
from eqaccel.families.tensor_product.pairs import WeightCopies, plan_pairs
from eqaccel.families.tensor_product.pairs.body import print_code, print_launch
from eqaccel.families.tensor_product.reference import to_ir_mul, to_mul_ir
from eqaccel.targets import TARGETS
from eqaccel.testing import ERROR_CONSTANT

_SCALARS = {"chunks": ("double", np.float64), "few channels": ("float", np.float32), "modes": ("float", np.float32)}
_POINTERS = (
    "x",
    "y",
    "w",
    "gz",
    "a",
    "b",
    "c",
    "z",
    "gx",
    "gy",
    "gw",
    "workspace",
    "row_ptr",
    "edge",
    "sender",
    "t_row_ptr",
    "t_slot",
)
_SIZES = ("num_receivers", "num_senders", "num_edges", "w_stride", "c_stride")
_FLAGS = ("mul_ir", "deterministic", "threads")
_READ = {
    Direction.FORWARD: ("x", "y", "w"),
    Direction.BACKWARD: ("x", "y", "w", "gz"),
    Direction.DOUBLE_BACKWARD: ("x", "y", "w", "gz", "a", "b", "c"),
}
_FAR = 1 << 20  # more slots than a row has


class Operands(ctypes.Structure):
    """The first members of `eq_operands`, and room for the others, which no such kernel reads."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_int32) for name in _FLAGS),
        ("rest", ctypes.c_void_p * 16),
    ]


class WorkSplit(ctypes.Structure):
    """`eq_work_split`."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("first", "last", "size", "longest", "cut")),
        ("partials", ctypes.c_void_p),
        ("w_row", ctypes.c_void_p),
    ]


def _library(name: str, direction: Direction, folder: Path) -> ctypes.CDLL:
    """The kernel of a case, for a GPU with an engine for copies."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    scalar, dtype = _SCALARS[name]
    plan = plan_pairs(TensorProductSpec(*CASES[name]), direction, TARGETS["sm_90"], np.dtype(dtype).itemsize)
    few = WeightCopies.ROWS if direction is Direction.FORWARD else WeightCopies.NONE
    assert plan.weight_copies is (few if name == "modes" else WeightCopies.CHUNKS)
    host = SUPPORT / "gpu_on_cpu"
    for file in Path(preludes.__file__).parent.glob("*.h"):
        if not (host / file.name).exists():
            shutil.copy(file, folder)
    (folder / "body.h").write_text(print_launch(plan) + print_code(plan))
    library = folder / "kernel.so"
    options = ["-std=c++20", "-O1", "-pthread", "-shared", "-fPIC"]
    options += [f"-DEQ_SCALAR={scalar}", f"-DEQ_DIRECTION={COMMON.index(direction)}", f"-I{folder}", f"-I{host}"]
    command = [compiler, *options, str(host / "pair_product.cpp"), "-o", str(library)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return ctypes.CDLL(str(library))


@dataclass(frozen=True)
class Call:
    """What a kernel is called with: arrays as the reference takes them, of rows (`graph` is None) or of edges.

    Attributes:
        graph: Senders and receivers of edges, and how many receivers there are.
        mul_ir: Whether rows are laid out as in e3nn, (mul, 2l+1); the reference has (2l+1, mul).
        late: Whether copies in the background are made when they are waited for, and not before.
    """

    spec: TensorProductSpec
    arrays: dict[str, NDArray]
    graph: tuple[NDArray, NDArray, int] | None
    mul_ir: bool
    late: bool

    def laid_out(self, name: str, rows: NDArray, convert: Callable[..., NDArray]) -> NDArray:
        """Rows in another layout, if it is asked for and they have one."""
        irreps = {"x": self.spec.irreps_in1, "a": self.spec.irreps_in1, "gx": self.spec.irreps_in1}
        irreps |= {"z": self.spec.irreps_out, "gz": self.spec.irreps_out}
        return np.ascontiguousarray(convert(irreps[name], rows)) if self.mul_ir and name in irreps else rows

    def run(self, kernel: ctypes.CDLL) -> dict[str, NDArray]:
        """All results; gradients of x of a graph, which are kept edge by edge, are added up here."""
        spec, edges, dtype = self.spec, len(self.arrays["y"]), self.arrays["x"].dtype
        sender, receiver, receivers = self.graph or (np.arange(edges), np.arange(edges), edges)
        order = np.lexsort((sender, receiver))
        shapes = {"z": (receivers, spec.z_dim), "gx": (edges, spec.x_dim), "gy": (edges, spec.y_dim)}
        shapes["gw"] = edges, spec.weight_numel
        results = {name: np.full(shape, np.nan, dtype) for name, shape in shapes.items()}
        held = {name: self.laid_out(name, array, to_mul_ir) for name, array in self.arrays.items()} | results
        blocks, split = -(-edges // 2), WorkSplit(last=edges, size=2, cut=2)
        if self.graph:
            blocks, split = receivers, WorkSplit(last=edges, longest=_FAR, cut=_FAR)  # a receiver each
            row_ptr = np.searchsorted(receiver[order], np.arange(receivers + 1))
            index = {"row_ptr": row_ptr, "edge": order, "sender": sender[order]}
            held |= {name: numbers.astype(np.int32) for name, numbers in index.items()}
            held["workspace"] = results["gx"]
        sizes = {"num_receivers": receivers, "num_senders": len(self.arrays["x"]), "num_edges": edges}
        sizes |= {"w_stride": spec.weight_numel, "c_stride": spec.weight_numel}
        o = Operands(**sizes, mul_ir=self.mul_ir, deterministic=1)
        for name, array in held.items():
            setattr(o, name, array.ctypes.data)
        assert kernel.run(ctypes.byref(o), ctypes.byref(split), blocks, ctypes.c_bool(self.late)) == 0
        found = {name: self.laid_out(name, rows, to_ir_mul) for name, rows in results.items()}
        if self.graph:
            of_edges, found["gx"] = found["gx"], np.zeros((sizes["num_senders"], spec.x_dim))
            np.add.at(found["gx"], sender[order], of_edges)
        return found


@pytest.mark.parametrize("direction", COMMON)
@pytest.mark.parametrize("name", _SCALARS)
def test_kernels_on_threads_of_a_cpu(name: str, direction: Direction, tmp_path: Path) -> None:
    """Each number is where it is looked for, whether copies come as soon or as late as they may."""
    kernel, spec, dtype = _library(name, direction, tmp_path), TensorProductSpec(*CASES[name]), _SCALARS[name][1]
    draw = np.random.default_rng(len(name))
    columns = {"x": spec.x_dim, "y": spec.y_dim, "w": spec.weight_numel, "gz": spec.z_dim}
    columns |= {"a": spec.x_dim, "b": spec.y_dim, "c": spec.weight_numel}
    receivers, senders, edges = 4, 6, 13
    graph = draw.integers(senders, size=edges), draw.choice([0, 2, 3], size=edges), receivers  # one receiver has none
    batch = np.arange(5), np.arange(5), 5  # the last block has one
    for sender, receiver, count in (batch, graph):
        is_graph = count == receivers
        rows = dict.fromkeys(columns, len(sender)) | {"gz": count}
        if is_graph:
            rows |= {"x": senders, "a": senders}
        arrays = {key: draw.standard_normal((rows[key], columns[key])).astype(dtype) for key in _READ[direction]}
        exact = {key: array.astype(np.float64) for key, array in arrays.items()}
        exact |= {"sender": sender, "receiver": receiver, "num_receivers": count}
        expected = TENSOR_PRODUCT.reference(spec, direction, **exact)
        size = TENSOR_PRODUCT.reference(spec, direction, absolute=True, **exact)
        for mul_ir, late in ((True, False), (False, True)):
            found = Call(spec, arrays, (sender, receiver, count) if is_graph else None, mul_ir, late).run(kernel)
            for output in OUTPUTS[direction]:
                error = np.abs(found[output] - getattr(expected, output))
                assert (error <= ERROR_CONSTANT * np.finfo(dtype).eps * getattr(size, output)).all(), output

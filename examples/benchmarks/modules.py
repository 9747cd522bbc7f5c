"""Modules of e3nn that networks of other kinds consist of: as they come, patched, and eqaccel's of the same name."""

from __future__ import annotations

import argparse
import contextlib
import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

import eqaccel
from eqaccel.benchmarks import pictures, report, suite
from eqaccel.benchmarks.contender import relative_error
from eqaccel.benchmarks.peers import o3_of_e3nn
from eqaccel.benchmarks.timing import Timing, describe, measure
from eqaccel.patches.torch_state import default_dtype
from eqaccel.testing import derivatives

_U16, _U32 = "16x0e+16x1o", "64x0e+32x1o+16x2e"

MODULES: Mapping[str, tuple[str, tuple[Any, ...]]] = MappingProxyType(
    {
        "gates": ("ElementwiseTensorProduct", ("64x1o+32x2e", "96x0e")),
        "dots": ("ElementwiseTensorProduct", (_U32, _U32, ["0e"])),
        "elementwise": ("ElementwiseTensorProduct", ("32x0e+32x1o", "32x0e+32x1o")),
        "full": ("FullTensorProduct", (_U16, _U16)),
        "full-harmonics": ("FullTensorProduct", (f"{_U16}+16x2e", "0e+1o+2e")),
        "square": ("TensorSquare", (_U16,)),
        "square-weights": ("TensorSquare", (_U16, f"{_U16}+16x2e")),
        "species": ("FullyConnectedTensorProduct", (_U32, "4x0e", _U32)),
        "attributes": ("FullyConnectedTensorProduct", (_U32, "4x0e", _U32)),
        "harmonics-weights": ("FullyConnectedTensorProduct", (_U16, "0e+1o+2e", f"{_U16}+16x2e")),
        "connected": ("FullyConnectedTensorProduct", (_U16, _U16, _U16)),
        "linear": ("Linear", (_U32, _U32)),
        "harmonics": ("SphericalHarmonics", ([0, 1, 2, 3], True, "component")),
    }
)
"""Class in e3nn.o3 and its arguments."""

ONE_HOT = "species"
"""Whose second operand is zero but for a one in each row; the others have random numbers."""
_CHECKED = 64  # rows that are compared with float64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    report.add_arguments(parser)
    parser.add_argument("--modules", type=suite.names(MODULES, list(MODULES)), default="all")
    parser.add_argument("--rows", type=suite.counts, help="how many; default: 64,50000 on a GPU, 64,2000 on a CPU")
    parser.add_argument("--repetitions", type=int, default=25)
    parser.add_argument("--budget", type=float, default=4.0, help="seconds for one implementation and direction")


def run(arguments: argparse.Namespace) -> report.Results:
    """Times each module with few rows and with many: forward, its gradients, and the gradients of those."""
    torch.set_num_threads(arguments.threads)
    results = report.new_results("modules", arguments)
    sizes = arguments.rows or [64, 50_000 if arguments.device == "cuda" else 2000]
    with contextlib.suppress(KeyboardInterrupt), suite.progress(len(arguments.modules) * len(sizes)) as bar:
        for name in arguments.modules:
            exact, implementations = _build(name, arguments)
            for rows in sizes:
                suite.describe_step(bar, f"{name}, {rows} rows")
                results["rows"] += _compare(name, rows, exact, implementations, arguments)
                bar.update()
    return results


def _build(name: str, arguments: argparse.Namespace) -> tuple[torch.nn.Module, dict[str, torch.nn.Module]]:
    """A module of e3nn in float64, and the implementations in the type and on the device that are timed."""
    kind, values = MODULES[name]
    dtype = getattr(torch, arguments.dtype)
    torch.manual_seed(0)
    with default_dtype(torch.float64):
        exact = getattr(o3_of_e3nn(), kind)(*values)
    plain = copy.deepcopy(exact).to(arguments.device, dtype)
    drop_in = getattr(eqaccel.o3, kind).from_e3nn(plain).to(arguments.device)
    network = torch.nn.ModuleDict({"module": copy.deepcopy(plain)})
    eqaccel.patch(network)
    return exact, {"eqaccel": drop_in, "patched": network["module"], "e3nn": plain}


def _compare(
    name: str,
    rows: int,
    exact: torch.nn.Module,
    implementations: Mapping[str, torch.nn.Module],
    arguments: argparse.Namespace,
) -> list[dict[str, Any]]:
    dtype = getattr(torch, arguments.dtype)
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(rows, dim, generator=generator, dtype=torch.float64) for dim in _dims(exact)]
    if name == ONE_HOT:
        inputs[1] = one_hot(inputs[1].argmax(1), inputs[1].size(1)).double()
    case = {"layer": name, "system": f"{rows} rows"}
    found: list[dict[str, Any]] = []
    known = {}
    for implementation, module in implementations.items():
        found.append({**case, "implementation": implementation, "note": ""})
        try:
            error = _error(module, exact, [tensor[:_CHECKED].to(dtype) for tensor in inputs], arguments.device)
        except Exception as failure:  # whatever one of them dies with belongs into its row
            found[-1]["note"] = describe(failure)
            continue
        found[-1]["error"] = error
        if error < suite.LIMITS[dtype]:
            known[implementation] = module
        else:
            found[-1]["note"] = f"wrong numbers: relative error {error:.1e}"
    operands = [tensor.to(arguments.device, dtype).requires_grad_() for tensor in inputs]
    work = {}
    for key, module in known.items():
        weights = [weight for weight in module.parameters() if weight.numel()]
        work[key] = suite.setups(lambda module=module: module, operands, weights)
    for name, direction in report.DIRECTIONS.items():
        setups = {key: each[direction] for key, each in work.items()}
        timings = measure(setups, arguments.device, arguments.repetitions, arguments.budget)
        for row in found:
            timing = timings.get(row["implementation"])
            if isinstance(timing, Timing):
                row[name] = timing.to_json()
            elif timing is not None:
                row["note"] = "; ".join(filter(None, [row["note"], f"{name}: {timing}"]))
    return found


def _dims(module: Any) -> list[int]:
    """Columns of its operands; harmonics take vectors, and squares one operand twice."""
    kind = type(module).__name__
    if kind in ("TensorSquare", "Linear", "SphericalHarmonics"):
        return [3 if kind == "SphericalHarmonics" else module.irreps_in.dim]
    return [module.irreps_in1.dim, module.irreps_in2.dim]


def _error(module: torch.nn.Module, exact: torch.nn.Module, inputs: Sequence[Tensor], device: str) -> float:
    """The largest relative error of values and two derivatives, of inputs that the type holds exactly."""
    results = []
    for each, place, dtype in ((module, device, inputs[0].dtype), (exact, "cpu", torch.float64)):
        operands = [tensor.to(place, dtype) for tensor in inputs]
        with torch.no_grad():
            size = each(*operands).shape
        generator = torch.Generator().manual_seed(2)
        shapes = (size, *(tensor.shape for tensor in operands))
        tangents = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        along = [tensor.to(place, dtype) for tensor in tangents]
        results.append(derivatives(each, operands, [along[:1], along[1:]]))
    return max(relative_error(*pair) for pair in zip(*results, strict=True))


def format_table(results: report.Results) -> str:
    """A line for each module and number of rows: e3nn's time, and how many times as fast the others are."""
    times = [f"{name.replace('_', ' ')}: e3nn, eqaccel, patched" for name in report.DIRECTIONS]
    header = ["module", "rows", *times, "note"]
    lines = []
    for name, rows, of_case in _cases(results):
        cells = []
        for direction in report.DIRECTIONS:
            times = {key: row[direction]["median_ms"] for key, row in of_case.items() if direction in row}
            if "e3nn" not in times:
                cells.append("-")
                continue
            speedups = (f"{times['e3nn'] / times[key]:.1f}x" if key in times else "-" for key in ("eqaccel", "patched"))
            cells.append(", ".join([f"{times['e3nn']:.3f} ms", *speedups]))
        notes = (f"{key}: {row['note']}" for key, row in of_case.items() if row["note"])
        lines.append([name, rows, *cells, "; ".join(notes)])
    return report.table(lines, header)


def draw(results: report.Results, path: Path) -> list[Path]:
    """Bars for each module, number of rows and direction: times of e3nn over those of the patched module."""
    names, speedups = [], {direction.replace("_", " "): [] for direction in report.DIRECTIONS}
    for name, rows, of_case in _cases(results):
        names.append(f"{name}, {rows}")
        for direction, values in zip(report.DIRECTIONS, speedups.values(), strict=True):
            times = [of_case.get(key, {}).get(direction) for key in ("e3nn", "patched")]
            values.append(times[0]["median_ms"] / times[1]["median_ms"] if all(times) else None)
    return pictures.grouped(results, path, names, speedups, "times as fast as e3nn", "Patched modules of e3nn")


def _cases(results: report.Results) -> list[tuple[str, str, dict[str, report.Row]]]:
    found: dict[tuple[str, str], dict[str, report.Row]] = {}
    for row in results["rows"]:
        found.setdefault((row["layer"], row["system"].split()[0]), {})[row["implementation"]] = row
    return [(*case, rows) for case, rows in found.items()]

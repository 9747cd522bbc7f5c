"""Kernels as smaller GPUs run them, on the GPU at hand: a process for each class of machines.

`EQACCEL_SHARED_KIB` makes a device count as one with less shared memory: it gets the plans of that class, and holds as
many blocks at a time as there. All else is that of the device: this tells what the plans cost, not how fast a smaller
GPU is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from eqaccel.benchmarks import problems, report, suite
from eqaccel.benchmarks.graphs import read_name
from eqaccel.benchmarks.problems import PROBLEMS
from eqaccel.codegen import SCALAR_BYTES
from eqaccel.families.tensor_product import travelling_plan
from eqaccel.targets import MACHINE_CLASSES, Target

_CLASSES = ",".join(str(target.shared_bytes // 1024) for target in MACHINE_CLASSES)
_LAYOUT = "ir_mul"  # the native one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    report.add_arguments(parser)
    parser.add_argument("--shared-kib", type=_sizes, default=_CLASSES, help=f"of each class; default: {_CLASSES}")
    every = list(problems.CONVOLUTIONS)
    parser.add_argument("--problems", type=suite.names(every, every), default="all", help=f"some of {', '.join(every)}")
    parser.add_argument("--graph", type=_graph, default="carbon")
    parser.add_argument("--directions", type=suite.names(report.DIRECTIONS, list(report.DIRECTIONS)), default="all")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="seconds of each process, as of kernels")


def run(arguments: argparse.Namespace) -> report.Results:
    """Times all problems in a process for each class, those with most shared memory first.

    Raises:
        SystemExit: On a CPU, which has no shared memory.
    """
    if arguments.device != "cuda":
        raise SystemExit("eqaccel bench machines: expected --device cuda and a GPU, got a CPU, where all plans are one")
    results = report.new_results("machines", arguments)
    for kib in sorted(arguments.shared_kib, reverse=True):
        found = measure_class(kib, arguments)
        results["rows"] += [
            row | {"shared_kib": kib, "planned_kib": planned(row["problem"], kib, arguments.dtype)}
            for row in found["rows"]
            if row["layout"] in (_LAYOUT, None)
        ]
        if arguments.json:
            report.write(arguments.json, json.dumps(results, indent=1) + "\n")
    return results


def measure_class(kib: int, arguments: argparse.Namespace) -> report.Results:
    """The benchmark of convolutions in a process of its own, to which the device has so much shared memory.

    Raises:
        RuntimeError: If it fails, with the end of what it printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernels.json"
        options = {
            "device": arguments.device,
            "dtype": arguments.dtype,
            "threads": arguments.threads,
            "problems": ",".join(arguments.problems),
            "graphs": arguments.graph,
            "directions": ",".join(arguments.directions),
            "repetitions": arguments.repetitions,
            "time-limit": arguments.time_limit,
            "json": file,
        }
        given = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        # Not from where this was started: a checkout there would hide the installed package.
        done = subprocess.run(
            [sys.executable, "-m", "eqaccel", "bench", "kernels", "--compare", "none", "--device-time", *given],
            env=os.environ | {"EQACCEL_SHARED_KIB": str(kib)},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"timing kernels for {kib} KiB failed: {done.stdout.strip()[-500:]}")
        return json.loads(file.read_text())


def planned(problem: str, kib: int, dtype: str) -> dict[str, int]:
    """KiB of shared memory of the class whose plan runs where a block may take `kib`, by direction."""
    machine = Target(f"gpu-{kib}", True, shared_bytes=kib * 1024)
    spec, size = PROBLEMS[problem].spec, SCALAR_BYTES[dtype]
    return {
        name: travelling_plan(spec, direction, machine, size).target.shared_bytes // 1024
        for name, direction in report.DIRECTIONS.items()
    }


def format_table(results: report.Results) -> str:
    """A row for each problem and direction, a column for each class: milliseconds, and how many times the first's."""
    sizes = list(dict.fromkeys(row["shared_kib"] for row in results["rows"]))
    rows = {(row["problem"], row["shared_kib"]): row for row in results["rows"]}
    lines = []
    for problem in dict.fromkeys(row["problem"] for row in results["rows"]):
        of_class = [rows.get((problem, kib), {}) for kib in sizes]
        for name in report.DIRECTIONS:
            if any(name in row for row in of_class):
                cells = [_cell(row, of_class[0], name) for row in of_class]
                lines.append([problem, name.replace("_", " "), *cells])
    text = report.table(lines, ["problem", "direction", *(f"{kib} KiB, ms" for kib in sizes)])
    notes = [f"- {row['problem']}, {row['shared_kib']} KiB: {row['note']}" for row in rows.values() if row["note"]]
    return "\n\n".join([text, "*: a plan of its own; else that of a larger class.", *filter(None, ["\n".join(notes)])])


def _cell(row: report.Row, largest: report.Row, direction: str) -> str:
    if direction not in row:
        return "-"
    time, own = row[direction]["median_ms"], row["planned_kib"][direction] == row["shared_kib"]
    if row is largest or direction not in largest:
        return f"{time:.3f}"
    return f"{time:.3f}, {time / largest[direction]['median_ms']:.2f}x{' *' if own else ''}"


def _sizes(text: str) -> list[int]:
    try:
        found = [int(size) for size in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < size <= 1024 for size in found):
        raise argparse.ArgumentTypeError(f"expected whole numbers from 1 to 1024, as in {_CLASSES}, got {text!r}")
    return list(dict.fromkeys(found))


def _graph(text: str) -> str:
    try:
        read_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text

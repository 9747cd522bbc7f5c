"""What a call costs the host: microseconds until it returns, on a problem too small to matter.

In a small system it is the host, not the device, that takes the time: a GPU has finished before the next call arrives.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from eqaccel.benchmarks import pictures, report, suite
from eqaccel.benchmarks.contender import Contender, shapes
from eqaccel.benchmarks.graphs import EdgeList, make_graph
from eqaccel.benchmarks.peers import CONVOLUTIONS
from eqaccel.benchmarks.problems import PROBLEMS
from eqaccel.benchmarks.timing import describe

_PARTS = ("forward_us", "forward_autograd_us", "backward_us")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    report.add_arguments(parser)
    parser.add_argument("--problems", type=suite.names(PROBLEMS), default="mp0-first")
    parser.add_argument("--graph", default="ring-4x2")
    parser.add_argument("--compare", type=suite.names([*CONVOLUTIONS, "none"]), default="cue,oeq-ir_mul")
    parser.add_argument("--calls", type=int, default=100, help="between two looks at the clock")
    parser.add_argument("--repetitions", type=int, default=15)


def run(arguments: argparse.Namespace) -> report.Results:
    """Measures every implementation, and an addition of torch to compare with."""
    device, dtype = arguments.device, getattr(torch, arguments.dtype)
    torch.set_num_threads(arguments.threads)
    results = report.new_results("overhead", arguments)
    graph = make_graph(arguments.graph).to(device)
    check = make_graph("radius-24x8").to(device)
    for problem in (PROBLEMS[name] for name in arguments.problems):
        rows = suite.build(problem, dtype, device, arguments.compare, CONVOLUTIONS, check)
        for row in rows:
            contender = row.pop("contender")
            if contender is not None:
                operands = [
                    torch.randn(shape, dtype=dtype, device=device, requires_grad=True)
                    for shape in shapes(problem.spec, graph)
                ]
                try:
                    row |= _costs(contender, graph, operands, arguments)
                except Exception as failure:
                    row["note"] = describe(failure)
            results["rows"].append(row | {"graph": graph.name, "edges": graph.num_edges})
    results["rows"].append({"problem": "-", "implementation": "torch.add", "note": ""} | _addition(device, arguments))
    return results


def format_table(results: report.Results) -> str:
    """A row for each implementation."""
    header = ["problem", "implementation", "forward, us", "with autograd, us", "backward, us", "note"]
    lines = []
    for row in results["rows"]:
        cells = [f"{row[part]:.1f}" if part in row else "-" for part in _PARTS]
        lines.append([row["problem"], row["implementation"], *cells, row["note"]])
    return report.table(lines, header)


def draw(results: report.Results, path: Path) -> list[Path]:
    """Bars for each implementation."""
    rows = [row for row in results["rows"] if "forward_us" in row]
    series = dict(
        zip(
            ("forward", "forward with autograd", "backward"),
            ([row.get(part) for row in rows] for part in _PARTS),
            strict=True,
        )
    )
    names = [row["implementation"] for row in rows]
    return pictures.grouped(results, path, names, series, "microseconds", "Host time of a call", log=False)


def _costs(
    contender: Contender, graph: EdgeList, operands: list[torch.Tensor], arguments: argparse.Namespace
) -> dict[str, Any]:
    product = contender.bind(graph)

    def forward() -> None:
        with torch.no_grad():
            product(*operands)

    z = product(*operands)
    gradient = torch.randn_like(z)
    runs = (forward, lambda: product(*operands), lambda: torch.autograd.grad(z, operands, gradient, retain_graph=True))
    return {part: _microseconds(run, arguments) for part, run in zip(_PARTS, runs, strict=True)}


def _addition(device: str, arguments: argparse.Namespace) -> dict[str, float]:
    one = torch.ones(1, device=device, requires_grad=True)
    z = torch.add(one, one)

    def forward() -> None:
        with torch.no_grad():
            torch.add(one, one)

    runs = (forward, lambda: torch.add(one, one), lambda: torch.autograd.grad(z, one, retain_graph=True))
    return {part: _microseconds(run, arguments) for part, run in zip(_PARTS, runs, strict=True)}


def _microseconds(run: Callable[[], object], arguments: argparse.Namespace) -> float:
    """The median over repetitions of the mean over calls, each repetition with an empty queue of the device."""
    gpu = arguments.device == "cuda"
    times = []
    for _ in range(1 + arguments.repetitions):
        if gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(arguments.calls):
            run()
        times.append(1e6 * (time.perf_counter() - start) / arguments.calls)
    return statistics.median(times[1:])

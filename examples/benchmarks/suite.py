"""Times many tensor products in many implementations: what the benchmarks of convolutions and batches share.

Every implementation is checked against float64 before it is timed: with all derivatives on a small graph, and on rows
of the very run that is timed. What is not installed, fails or computes something else gets a row that says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from eqaccel import runtime
from eqaccel.benchmarks import report
from eqaccel.benchmarks.contender import Factory, Truth, sample_error, shapes
from eqaccel.benchmarks.graphs import EdgeList, batch, make_graph
from eqaccel.benchmarks.problems import PROBLEMS, Problem
from eqaccel.benchmarks.report import DIRECTIONS
from eqaccel.benchmarks.roofline import Roofline, floor_bytes, measure_roofline, operations
from eqaccel.benchmarks.timing import Timing, describe, free_memory, measure
from eqaccel.codegen import COMMON, Direction
from eqaccel.errors import EqaccelError
from eqaccel.families.tensor_product import payload

LIMITS = {torch.float32: 1e-5, torch.float64: 1e-11}
"""Largest relative error of an implementation that is timed."""

Table = Mapping[str, Mapping[str, Factory]]


def names(known: Iterable[str] | None, every: Sequence[str] = ()) -> Callable[[str], list[str]]:
    """A parser of comma-separated names, of which "all" stands for several; of any names if none are known."""
    allowed = None if known is None else [*known, "all"]

    def parse(text: str) -> list[str]:
        found = text.split(",")
        unknown = [name for name in found if allowed is not None and name not in allowed]
        if unknown:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(allowed or ())}, got {', '.join(unknown)}")
        return [each for name in found for each in (every if name == "all" and every else [name])]

    return parse


def counts(text: str) -> list[int]:
    """A parser of comma-separated numbers."""
    return [int(count) for count in text.split(",")]


def add_arguments(
    parser: argparse.ArgumentParser, table: Table, every: Sequence[str], compare: str | None, device_time: bool = False
) -> None:
    """The options of a benchmark that times tensor products.

    Args:
        parser: Where to add them.
        table: The contenders.
        every: Problems that "all" stands for.
        compare: Default of --compare; None for one that depends on the device.
        device_time: Default of --device-time.
    """
    report.add_arguments(parser)
    parser.add_argument("--problems", type=names(PROBLEMS, every), help=f"all, or some of {', '.join(PROBLEMS)}")
    choice = ", ".join(table)
    parser.add_argument("--compare", type=names([*table, "none"]), default=compare, help=f"none, or some of {choice}")
    parser.add_argument("--directions", type=names(DIRECTIONS, list(DIRECTIONS)), default="all")
    parser.add_argument("--repetitions", type=int, help="default: 20 on a GPU, 7 on a CPU")
    parser.add_argument("--budget", type=float, help="seconds for one implementation and direction (0.5 or 20)")
    parser.add_argument(
        "--device-time",
        action=argparse.BooleanOptionalAction,
        default=device_time,
        help="on a GPU, leave out what the host takes to queue a call",
    )
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="seconds after which no case is begun")


def run(
    benchmark: str, arguments: argparse.Namespace, table: Table, workloads: Sequence[EdgeList | str]
) -> report.Results:
    """Times all problems on all workloads.

    Args:
        benchmark: Its name.
        arguments: The options.
        table: The contenders.
        workloads: Graphs, or names of graphs.

    Returns:
        Results, one row for each implementation on each graph of each problem.
    """
    start = time.monotonic()
    device, dtype = arguments.device, getattr(torch, arguments.dtype)
    gpu = device == "cuda"
    arguments.repetitions = arguments.repetitions or (20 if gpu else 7)
    arguments.budget = arguments.budget or (0.5 if gpu else 20.0)
    # e3nn takes long to build and long to run; on a GPU it is compared when it is asked for.
    arguments.compare = arguments.compare or (["cue", "oeq"] if gpu else ["e3nn", "cue", "oeq"])
    torch.set_num_threads(arguments.threads)
    results = report.new_results(benchmark, arguments)
    results["environment"]["device_time"] = gpu and arguments.device_time
    roofline = measure_roofline(device, dtype, arguments.threads)
    results["roofline"] = roofline.to_json()
    graphs = [(make_graph(w) if isinstance(w, str) else w).to(device) for w in workloads]
    problems = [PROBLEMS[name] for name in arguments.problems]
    results["compile_s"] = compile_kernels(problems, arguments)
    # What was measured before an interrupt is kept: a run over all peers takes long.
    with contextlib.suppress(KeyboardInterrupt), progress(len(problems) * (1 + len(graphs))) as bar:
        for problem in problems:
            describe_step(bar, f"{problem.name}: build and check")
            late = time.monotonic() - start > arguments.time_limit
            # A batch is checked as a batch: the implementations differ.
            check = batch(40) if graphs[0].edge_index is None else make_graph("radius-24x8").to(device)
            rows = [] if late else build(problem, dtype, device, arguments.compare, table, check)
            bar.update()
            for edges in graphs:
                describe_step(bar, f"{problem.name} on {edges.name}")
                if late or time.monotonic() - start > arguments.time_limit:
                    results["rows"].append(_untimed(problem, edges, f"not begun within {arguments.time_limit:.0f} s"))
                else:
                    results["rows"] += run_case(problem, edges, rows, roofline, arguments)
                bar.update()
            rows.clear()
            if arguments.json:
                report.write(arguments.json, json.dumps(results, indent=1) + "\n")
    results["run_s"] = time.monotonic() - start
    return results


def progress(total: int) -> Any:
    """A progress bar; where nobody watches, a line of it now and then."""
    from tqdm import tqdm

    return tqdm(total=total, mininterval=0.1 if sys.stderr.isatty() else 10)


def describe_step(bar: Any, text: str) -> None:
    """Says what is being done, at once if somebody watches."""
    bar.set_description(text, refresh=sys.stderr.isatty())


def compile_kernels(problems: Sequence[Problem], arguments: argparse.Namespace) -> float:
    """Compiles eqaccel's kernels of all problems side by side, into the disk cache; returns the seconds it took."""
    start = time.monotonic()
    backend, arch = "cpu", None
    if arguments.device == "cuda":
        backend = "hip" if torch.version.hip else "cuda"
        devices = runtime.hip_devices() if backend == "hip" else runtime.cuda_devices()
        arch = devices[torch.cuda.current_device()]["arch"]

    def compile_one(job: tuple[runtime.Program, str]) -> None:
        with contextlib.suppress(EqaccelError):  # comes back when the kernel is used, and then belongs to a row
            runtime.compile_program(job[0], backend, arguments.dtype, job[1], arch)

    programs = []
    for problem in problems:
        with contextlib.suppress(EqaccelError):
            programs.append(runtime.Program(payload(problem.spec)[0]))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(compile_one, [(program, name) for program in programs for name in arguments.directions]))
    return time.monotonic() - start


def build(
    problem: Problem, dtype: torch.dtype, device: str, compare: Sequence[str], table: Table, check: EdgeList
) -> list[dict[str, Any]]:
    """A row for each implementation: the contender, or a note that says why there is none."""
    blank: dict[str, Any] = {"problem": problem.name, "layout": None, "note": "", "contender": None}
    try:
        truth = Truth(problem.spec, check, dtype, device)
    except EqaccelError as unsupported:
        return [blank | {"implementation": "eqaccel", "note": describe(unsupported)}]
    rows: list[dict[str, Any]] = []
    for family in dict.fromkeys(["eqaccel", *(name for name in compare if name != "none")]):
        for name, factory in table[family].items():
            rows.append(blank | {"implementation": name})
            try:
                contender = factory(problem.spec, dtype, device)
                error = truth.error(contender)
            except ImportError as missing:
                rows[-1] |= {"implementation": family, "note": describe(missing)}
                break
            except Exception as failure:  # whatever a peer dies with belongs into its row
                rows[-1]["note"] = describe(failure)
                continue
            right = error < LIMITS[dtype]
            note = "" if right else f"wrong numbers: relative error {error:.1e}"
            known = {"layout": contender.layout, "error": error, "note": note}
            rows[-1] |= known | {"contender": contender if right else None}
    return rows


def setups(
    bind: Callable[[], Callable[..., torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor] = (),
) -> dict[Direction, Callable[[], Callable[[], object]]]:
    """What to time for each direction, behind functions that prepare it.

    Args:
        bind: Gives the function that is timed.
        inputs: What it is called with.
        weights: What it is differentiated by too.
    """
    operands = [*inputs, *weights]

    def forward() -> Callable[[], object]:
        product = bind()

        def run() -> object:
            with torch.no_grad():
                return product(*inputs)

        return run

    def backward() -> Callable[[], object]:
        z = bind()(*inputs)
        gradient = torch.randn_like(z)
        return lambda: torch.autograd.grad(z, operands, gradient, retain_graph=True)

    def double_backward() -> Callable[[], object]:
        z = bind()(*inputs)
        gradient = torch.randn_like(z).requires_grad_()
        gradients = torch.autograd.grad(z, operands, gradient, create_graph=True)
        tangents = [torch.randn_like(g) for g in gradients]
        wanted = [*operands, gradient]  # of which a linear function has some that nothing depends on
        return lambda: torch.autograd.grad(gradients, wanted, tangents, retain_graph=True, allow_unused=True)

    return dict(zip(COMMON, (forward, backward, double_backward), strict=True))


def limits(
    problem: Problem, edges: EdgeList, direction: Direction, dtype: torch.dtype, roofline: Roofline, gpu: bool
) -> dict[str, float]:
    """What the work needs at least: bytes, operations, and the milliseconds that the machine takes for them.

    On a GPU these kernels are held against memory alone, whose roof is the lower one for nearly all of them.
    """
    spec, itemsize = problem.spec, dtype.itemsize
    moved = floor_bytes(spec, edges.num_nodes, edges.num_edges, direction, itemsize)
    count = operations(spec, edges.num_edges, direction, itemsize)
    found = {"bytes": moved, "flops": count, "memory_ms": 1e3 * moved / roofline.bandwidth}
    return found if gpu else found | {"arithmetic_ms": 1e3 * count / roofline.peak}


def run_case(
    problem: Problem,
    edges: EdgeList,
    built: Sequence[Mapping[str, Any]],
    roofline: Roofline,
    arguments: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Checks and times all implementations of one problem on one graph."""
    dtype, device = getattr(torch, arguments.dtype), arguments.device
    free_memory()
    occupied = torch.cuda.memory_allocated() if device == "cuda" else 0
    facts = {"graph": edges.name, "nodes": edges.num_nodes, "edges": edges.num_edges}
    results = [facts | {key: value for key, value in row.items() if key != "contender"} for row in built]
    contenders = {row["implementation"]: row["contender"] for row in built if row["contender"] is not None}
    if not contenders:
        return results
    torch.manual_seed(0)
    try:
        operands = [
            torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes(problem.spec, edges)
        ]
    except torch.OutOfMemoryError as error:
        return [row | {"note": row["note"] or describe(error)} for row in results]
    busiest = 0 if edges.edge_index is None else int(edges.receiver.bincount().argmax())
    sampled = {0, busiest, edges.num_nodes - 1}
    for row in results:
        name = row["implementation"]
        if name not in contenders:
            continue
        try:
            error = sample_error(contenders[name], problem.spec, edges, operands, sorted(sampled))
            note = "" if error < LIMITS[dtype] else f"wrong numbers on this graph: relative error {error:.1e}"
        except Exception as failure:
            note = describe(failure)
        if note:
            row["note"] = note
            del contenders[name]
    for name in arguments.directions:
        direction = DIRECTIONS[name]
        work = {key: setups(partial(each.bind, edges), operands)[direction] for key, each in contenders.items()}
        timings = measure(work, device, arguments.repetitions, arguments.budget, occupied, arguments.device_time)
        floor = limits(problem, edges, direction, dtype, roofline, device == "cuda")
        for row in results:
            timing = timings.get(row["implementation"])
            if isinstance(timing, str):
                row["note"] = "; ".join(filter(None, [row["note"], f"{name}: {timing}"]))
            elif timing is not None:
                own = timings.get(f"eqaccel ({row['layout']})")
                row[name] = timing.to_json() | {
                    "ratio": timing.median / own.median if isinstance(own, Timing) else None,
                    **{f"of_{key[:-3]}": value / timing.median for key, value in floor.items() if key.endswith("_ms")},
                    **{f"floor_{key}": value for key, value in floor.items()},
                }
    return results


def _untimed(problem: Problem, edges: EdgeList, note: str) -> dict[str, Any]:
    facts = {"graph": edges.name, "nodes": edges.num_nodes, "edges": edges.num_edges, "problem": problem.name}
    return facts | {"implementation": "eqaccel", "layout": None, "note": note, "begun": False}

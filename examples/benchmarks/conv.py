"""Times the fused graph convolution beside e3nn, cuEquivariance and OpenEquivariance.

    python examples/benchmarks/conv.py --device cuda --problems mace-large --graphs carbon --compare e3nn,cue,oeq

Every implementation is checked against float64 on a small graph, derivatives included, before it is timed; what is not
installed, fails or computes something else gets a row that says so. Ratios are times over those of eqaccel in the same
layout. On a GPU times are set against a floor, each input read once and each output written once at the bandwidth of a
copy; on a CPU against the peak of multiply-adds and the bandwidth of reading memory.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import report
import torch
from graphs import GRAPHS, EdgeList, make_graph
from peers import CONTENDERS, Contender, relative_error
from problems import PROBLEMS, Problem
from roofline import Roofline, floor_bytes, measure_roofline, operations
from timing import Timing, describe, measure

from eqaccel.plan import Direction

DIRECTIONS = {direction.value: direction for direction in Direction}
LIMITS = {torch.float32: 1e-5, torch.float64: 1e-11}
"""Largest relative error of an implementation that is timed."""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    def names(known: Sequence[str] | None) -> Callable[[str], list[str]]:
        def parse(text: str) -> list[str]:
            unknown = set(text.split(",")) - set(known) if known is not None else set()
            if unknown:
                raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, got {', '.join(unknown)}")
            return text.split(",")

        return parse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    report.add_arguments(parser)
    problems = "mace-large,mace-medium,mp0-first,mp0-second"
    parser.add_argument("--problems", type=names(list(PROBLEMS)), default=problems, help=", ".join(PROBLEMS))
    parser.add_argument("--graphs", type=names(None), help=f"of {', '.join(GRAPHS)}; default: by device")
    parser.add_argument("--compare", type=names(list(CONTENDERS)), default="e3nn,cue,oeq", help=", ".join(CONTENDERS))
    parser.add_argument("--directions", type=names(list(DIRECTIONS)), default=",".join(DIRECTIONS))
    parser.add_argument("--repetitions", type=int, help="default: 20 on a GPU, 7 on a CPU")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds for one implementation and direction")
    arguments = parser.parse_args(argv)
    gpu = arguments.device == "cuda"
    arguments.graphs = arguments.graphs or (["carbon", "dhfr", "covid"] if gpu else ["local-100x60"])
    arguments.repetitions = arguments.repetitions or (20 if gpu else 7)
    return arguments


def build(problem: Problem, dtype: torch.dtype, device: str, compare: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each implementation: the contender, or a note that says why there is none."""
    check = make_graph("radius-40x8").to(device)
    rows = []
    for family in dict.fromkeys(["eqaccel", *compare]):
        for name, factory in CONTENDERS[family].items():
            row: dict[str, Any] = {"problem": problem.name, "implementation": name, "layout": None, "note": ""}
            rows.append(row | {"contender": None})
            try:
                contender = factory(problem.spec, dtype, device)
                error = relative_error(contender, problem.spec, check, dtype)
            except ImportError as missing:
                rows[-1] |= {"implementation": family, "note": f"not installed: {missing}"}
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
    contender: Contender, problem: Problem, edges: EdgeList, dtype: torch.dtype
) -> dict[Direction, Callable[[], Callable[[], object]]]:
    """What to time for each direction, behind functions that prepare it."""
    device, spec = edges.edge_index.device, problem.spec

    def operands() -> list[torch.Tensor]:
        torch.manual_seed(0)
        shapes = [(edges.num_nodes, spec.x_dim), (edges.num_edges, spec.y_dim), (edges.num_edges, spec.weight_numel)]
        return [torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes]

    def forward() -> Callable[[], object]:
        convolve, inputs = contender.bind(edges), operands()

        def run() -> object:
            with torch.no_grad():
                return convolve(*inputs)

        return run

    def backward() -> Callable[[], object]:
        inputs = operands()
        z = contender.bind(edges)(*inputs)
        gradient = torch.randn_like(z)
        return lambda: torch.autograd.grad(z, inputs, gradient, retain_graph=True)

    def double_backward() -> Callable[[], object]:
        inputs = operands()
        z = contender.bind(edges)(*inputs)
        gradient = torch.randn_like(z).requires_grad_()
        gradients = torch.autograd.grad(z, inputs, gradient, create_graph=True)
        tangents = [torch.randn_like(g) for g in gradients]
        return lambda: torch.autograd.grad(gradients, [*inputs, gradient], tangents, retain_graph=True)

    return dict(zip(Direction, (forward, backward, double_backward), strict=True))


def limits(
    problem: Problem, edges: EdgeList, direction: Direction, dtype: torch.dtype, roofline: Roofline
) -> dict[str, float]:
    """The least milliseconds that the machine allows: by memory, and on a CPU by arithmetic."""
    spec, itemsize = problem.spec, dtype.itemsize
    moved = floor_bytes(spec, edges.num_nodes, edges.num_edges, direction, itemsize)
    found = {"memory_ms": 1e3 * moved / roofline.bandwidth, "bytes": moved}
    if roofline.peak:
        count = operations(spec, edges.num_edges, direction, itemsize)
        found |= {"arithmetic_ms": 1e3 * count / roofline.peak, "flops": count}
    return found


def run_case(
    problem: Problem, edges: EdgeList, rows: list[dict[str, Any]], roofline: Roofline, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Times all implementations of one problem on one graph."""
    dtype = getattr(torch, arguments.dtype)
    facts = {"graph": edges.name, "nodes": edges.num_nodes, "edges": edges.num_edges}
    results = [facts | {key: value for key, value in row.items() if key != "contender"} for row in rows]
    for name in arguments.directions:
        direction = DIRECTIONS[name]
        work = {
            row["implementation"]: setups(row["contender"], problem, edges, dtype)[direction]
            for row in rows
            if row["contender"] is not None
        }
        timings = measure(work, arguments.device, arguments.repetitions, arguments.budget)
        floor = limits(problem, edges, direction, dtype, roofline)
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


def format_table(rows: Sequence[dict[str, Any]], directions: Sequence[str], cpu: bool) -> str:
    use = "(% of FMA peak, of DRAM)" if cpu else "(% of floor)"
    header = ["graph", "problem", "implementation"]
    for name in directions:
        header += [f"{name.replace('_', ' ')}, ms {use}", "ratio"]
    lines = []
    for row in rows:
        cells = [f"{row['graph']} {row['nodes']}/{row['edges']}", row["problem"], row["implementation"]]
        for name in directions:
            found = row.get(name)
            if found is None:
                cells += ["-", "-"]
                continue
            shares = [found[key] for key in ("of_arithmetic", "of_memory") if key in found]
            cells.append(f"{found['median_ms']:.3f} ({', '.join(f'{100 * share:.0f}' for share in shares)})")
            cells.append("-" if found["ratio"] is None else f"{found['ratio']:.2f}")
        lines.append([*cells, f"{row['error']:.0e}" if row.get("error") is not None else "-", row["note"]])
    return report.table(lines, [*header, "error", "note"])


def draw(results: dict[str, Any], arguments: argparse.Namespace) -> None:
    """One group of bars for each graph, problem and direction."""
    rows, names = results["rows"], list(dict.fromkeys(row["implementation"] for row in results["rows"]))
    cases = list(dict.fromkeys((row["graph"], row["problem"]) for row in rows))
    groups = [(*case, direction) for case in cases for direction in arguments.directions]
    times = {
        (row["graph"], row["problem"], direction, row["implementation"]): row[direction]
        for row in rows
        for direction in arguments.directions
        if direction in row
    }
    series = {name: [times.get((*g, name), {}).get("median_ms") for g in groups] for name in names}
    series = {name: values for name, values in series.items() if any(values)}
    floors = []
    for group in groups:
        found = next((times[(*group, name)] for name in names if (*group, name) in times), {})
        floors.append(max(found.get("floor_memory_ms", 0.0), found.get("floor_arithmetic_ms", 0.0)))
    labels = ["\n".join(group).replace("_", " ") for group in groups]
    title = f"Fused convolution, {results['dtype']}, {results['environment']['device']}"
    report.plot_bars(arguments.plot, labels, series, "milliseconds", title, floors)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    arguments = parse_arguments(argv)
    torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    roofline = measure_roofline(arguments.device, dtype, arguments.threads)
    results: dict[str, Any] = {
        "environment": report.environment(arguments.device, arguments.threads),
        "dtype": arguments.dtype,
        "roofline": roofline.to_json(),
        "rows": [],
    }
    graphs = [make_graph(name).to(arguments.device) for name in arguments.graphs]
    # What was measured before an interrupt is kept: a run over all peers takes long.
    with contextlib.suppress(KeyboardInterrupt):
        for problem in (PROBLEMS[name] for name in arguments.problems):
            rows = build(problem, dtype, arguments.device, arguments.compare)
            for edges in graphs:
                results["rows"] += run_case(problem, edges, rows, roofline, arguments)
    text = format_table(results["rows"], arguments.directions, arguments.device == "cpu")
    report.publish(results, f"{report.heading(results)}\n\n{text}", arguments)
    if arguments.plot:
        draw(results, arguments)
    return results


if __name__ == "__main__":
    main()

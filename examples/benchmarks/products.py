"""The benchmarks of tensor products: convolutions, batches, convolutions on many graphs, and on ever larger ones."""

from __future__ import annotations

import argparse

import eqaccel
from eqaccel.benchmarks import problems, report, suite
from eqaccel.benchmarks.graphs import GRAPHS, EdgeList, batch, make_graph, read_name
from eqaccel.benchmarks.peers import CONVOLUTIONS, PRODUCTS
from eqaccel.benchmarks.timing import Timing, measure

_FEW = "mace-large,mace-medium,mp0-first,mp0-second"


def add_kernels(parser: argparse.ArgumentParser) -> None:
    """Options of the convolutions."""
    suite.add_arguments(parser, CONVOLUTIONS, problems.CONVOLUTIONS, None)
    _add_graphs(parser, None)


def run_kernels(arguments: argparse.Namespace) -> report.Results:
    """Problems on graphs; on a GPU all of them, on a CPU a few, unless told otherwise."""
    gpu = arguments.device == "cuda"
    arguments.problems = arguments.problems or (list(problems.CONVOLUTIONS) if gpu else _FEW.split(","))
    arguments.graphs = arguments.graphs or (["carbon", "dhfr", "covid", "covid-morton"] if gpu else ["local-100x60"])
    return suite.run("kernels", arguments, CONVOLUTIONS, arguments.graphs)


def add_batch(parser: argparse.ArgumentParser) -> None:
    """Options of the batches."""
    suite.add_arguments(parser, PRODUCTS, problems.PRODUCTS, None)
    parser.add_argument("--rows", type=int, help="of the batch; default: 50 000 on a GPU, 2000 on a CPU")


def run_batch(arguments: argparse.Namespace) -> report.Results:
    """Tensor products row by row."""
    rows = arguments.rows or (50_000 if arguments.device == "cuda" else 2000)
    arguments.problems = arguments.problems or list(problems.PRODUCTS)
    return suite.run("batch", arguments, PRODUCTS, [batch(rows)])


def add_graphs(parser: argparse.ArgumentParser) -> None:
    """Options of the comparison of graphs."""
    suite.add_arguments(parser, CONVOLUTIONS, problems.CONVOLUTIONS, "none", device_time=True)
    _add_graphs(parser, "all")
    parser.set_defaults(problems=["mace-large", "mace-medium"])


def run_graphs(arguments: argparse.Namespace) -> report.Results:
    """A few problems on many graphs, and what it takes to sort their edges."""
    graphs = [make_graph(name) for name in arguments.graphs]
    facts = {edges.name: _graph_facts(edges.to(arguments.device), arguments) for edges in graphs}
    results = suite.run("graphs", arguments, CONVOLUTIONS, graphs)
    results["rows"] = [row | facts[row["graph"]] for row in results["rows"]]
    return results


def graphs_table(results: report.Results) -> str:
    """The graphs, and every row."""
    known = {row["graph"]: row for row in results["rows"]}
    lines = [
        [name, row["nodes"], row["edges"], row["max_degree"], _sort_time(row), GRAPHS.get(name, "")]
        for name, row in known.items()
    ]
    header = ["graph", "nodes", "edges", "most neighbours", "sorting the edges, ms", "what it is"]
    return f"{report.table(lines, header)}\n\n{report.product_table(results)}"


def graphs_compact(results: report.Results) -> str:
    """A line for each problem and graph: nanoseconds an edge and percent of the floor."""
    known = [name for name in report.DIRECTIONS if any(name in row for row in results["rows"])]
    header = ["problem", "graph", *(f"{name.replace('_', ' ')}: ns an edge, % of floor" for name in known)]
    lines = []
    for problem, graph in dict.fromkeys((row["problem"], row["graph"]) for row in results["rows"]):
        cells = [problem, graph]
        of_case = [row for row in results["rows"] if (row["problem"], row["graph"]) == (problem, graph)]
        for name in known:
            row = report.best(of_case, name, ["eqaccel"])
            if row is None:
                cells.append("-")
            else:
                found = row[name]
                cost = 1e6 * found["median_ms"] / row["edges"]
                cells.append(f"{cost:.2f}, {100 * report.share_of_floor(found):.0f} %")
        lines.append(cells)
    return report.table(lines, header)


def add_scaling(parser: argparse.ArgumentParser) -> None:
    """Options of the growing graphs."""
    suite.add_arguments(parser, CONVOLUTIONS, problems.CONVOLUTIONS, "cue,oeq-ir_mul", device_time=True)
    parser.add_argument("--edges", help="numbers of edges, as in 1e4,3e4; default: to 1e7 on a GPU, 1e5 on a CPU")
    parser.add_argument("--neighbours", type=int, default=60, help="of every node, even")
    parser.set_defaults(problems=["mp0-second"])


def run_scaling(arguments: argparse.Namespace) -> report.Results:
    """One problem on rings of more and more nodes; what does not fit into memory says so."""
    largest = "1e4,3e4,1e5,3e5,1e6,3e6,1e7" if arguments.device == "cuda" else "1e4,3e4,1e5"
    sizes = [float(size) / arguments.neighbours for size in (arguments.edges or largest).split(",")]
    graphs = [f"ring-{max(round(size), arguments.neighbours + 1)}x{arguments.neighbours}" for size in sizes]
    return suite.run("scaling", arguments, CONVOLUTIONS, graphs)


def _add_graphs(parser: argparse.ArgumentParser, default: str | None) -> None:
    known = "; ".join(f"{name} ({what})" for name, what in GRAPHS.items())
    help_text = f"all, or some of {known}; local-NxD, radius-NxD and ring-NxD: N nodes with D neighbours"
    parser.add_argument("--graphs", type=_graph_names, default=default, help=help_text)


def _graph_names(text: str) -> list[str]:
    found = suite.names(None, list(GRAPHS))(text)
    try:
        for name in found:
            read_name(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return found


def _graph_facts(edges: EdgeList, arguments: argparse.Namespace) -> dict[str, object]:
    def sort() -> object:
        return eqaccel.Graph(edges.receiver, edges.sender, edges.num_nodes)

    timing = measure({"": lambda: sort}, arguments.device, 20, 1.0)[""]
    found = {"sort_ms": timing.median} if isinstance(timing, Timing) else {}
    return found | {"max_degree": int(edges.receiver.bincount().max())}


def _sort_time(row: report.Row) -> str:
    return f"{row['sort_ms']:.3f}" if "sort_ms" in row else "-"

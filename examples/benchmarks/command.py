"""`eqaccel bench`, or `python -m eqaccel bench`: times eqaccel beside its peers.

    eqaccel bench kernels --device cuda --problems mace-large --graphs carbon --compare e3nn,cue,oeq
    eqaccel bench report first.json second.json --markdown table.md --plot picture.png

Every implementation is checked against float64, derivatives included, before it is timed. Ratios are times over those
of eqaccel in the same layout; the floor is each input read once and each output written once, at the bandwidth of a
copy measured in the same run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from eqaccel.benchmarks import (
    batches,
    machines,
    matrices,
    model_tables,
    models,
    modules,
    overhead,
    pictures,
    precision,
    products,
    report,
    step_tables,
    steps,
    training,
    training_tables,
)

EXTRAS = "ase matplotlib scipy tqdm"
"""What benchmarks need besides eqaccel: the extra `bench`."""


@dataclass(frozen=True)
class Benchmark:
    """A sub-command.

    Attributes:
        help: What it times, in a line.
        add_arguments: Adds its options to a parser.
        run: Runs it.
        table: Everything it found, for people to read.
        compact: A short table that shows where eqaccel stands.
        draw: Draws pictures, the first of them at the path given; returns their paths.
    """

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], report.Results]
    table: Callable[[report.Results], str]
    compact: Callable[[report.Results], str]
    draw: Callable[[report.Results, Path], Sequence[Path]]


BENCHMARKS: dict[str, Benchmark] = {
    "kernels": Benchmark(
        "the fused graph convolution: forward, backward and double backward",
        products.add_kernels,
        products.run_kernels,
        report.product_table,
        report.compact_table,
        pictures.draw_products,
    ),
    "batch": Benchmark(
        "the tensor product without a graph",
        products.add_batch,
        products.run_batch,
        report.product_table,
        report.compact_table,
        pictures.draw_products,
    ),
    "graphs": Benchmark(
        "one convolution on graphs of many kinds, and the sorting of their edges",
        products.add_graphs,
        products.run_graphs,
        products.graphs_table,
        products.graphs_compact,
        pictures.by_graph,
    ),
    "scaling": Benchmark(
        "one convolution on more and more edges",
        products.add_scaling,
        products.run_scaling,
        report.product_table,
        products.graphs_compact,
        pictures.scaling,
    ),
    "machines": Benchmark(
        "the fused graph convolution as planned for GPUs with less shared memory",
        machines.add_arguments,
        machines.run,
        machines.format_table,
        machines.format_table,
        pictures.by_machine,
    ),
    "overhead": Benchmark(
        "what a call costs the host",
        overhead.add_arguments,
        overhead.run,
        overhead.format_table,
        overhead.format_table,
        overhead.draw,
    ),
    "matrices": Benchmark(
        "layers of radial networks",
        matrices.add_arguments,
        matrices.run,
        matrices.format_table,
        matrices.format_table,
        matrices.draw,
    ),
    "modules": Benchmark(
        "modules of e3nn outside of interatomic potentials, patched and replaced",
        modules.add_arguments,
        modules.run,
        modules.format_table,
        modules.format_table,
        modules.draw,
    ),
    "models": Benchmark(
        "energy and forces of whole MACE and NequIP models",
        models.add_arguments,
        models.run,
        model_tables.format_tables,
        model_tables.compact,
        model_tables.draw,
    ),
    "step": Benchmark(
        "whole steps of molecular dynamics in ASE",
        steps.add_arguments,
        steps.run,
        step_tables.format_table,
        step_tables.compact,
        step_tables.draw,
    ),
    "batches": Benchmark(
        "steps of torch-sim's dynamics, of one cell and of several",
        batches.add_arguments,
        batches.run,
        batches.format_table,
        batches.compact,
        batches.draw,
    ),
    "training": Benchmark(
        "steps of training on energies and forces",
        training.add_arguments,
        training.run,
        training_tables.format_table,
        training_tables.compact,
        training_tables.draw,
    ),
    "precision": Benchmark(
        "errors of forces, energies and phonons of models that are less precise than float32",
        precision.add_arguments,
        precision.run,
        precision.format_table,
        precision.format_table,
        precision.draw,
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a sub-command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="eqaccel bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, benchmark in BENCHMARKS.items():
        benchmark.add_arguments(commands.add_parser(name, help=benchmark.help))
    again = commands.add_parser("report", help="tables and pictures from JSON files, of one run or of its pieces")
    again.add_argument("files", type=Path, nargs="+", metavar="file.json", help="of equal rows the last one counts")
    report.add_outputs(again)
    arguments = parser.parse_args(argv)
    try:
        run(arguments)
    except ImportError as missing:
        print(f"eqaccel bench: {missing}. Install what benchmarks need: pip install {EXTRAS}", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        if arguments.command != "report":
            raise
        print(f"eqaccel bench report: expected files of results that belong together: {error}", file=sys.stderr)
        return 1
    return 0


def run(arguments: argparse.Namespace) -> report.Results:
    """Runs what the command line asks for, prints the table and writes the files."""
    if arguments.command == "report":
        results = report.load(arguments.files)
    else:
        results = BENCHMARKS[arguments.command].run(arguments)
    benchmark = BENCHMARKS[results["benchmark"]]
    report.publish(results, f"{report.heading(results)}\n\n{benchmark.table(results)}", arguments)
    if arguments.plot:
        for picture in benchmark.draw(results, arguments.plot):
            print(f"wrote {picture}")
    return results

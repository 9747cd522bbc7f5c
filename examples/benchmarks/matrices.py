"""The layers of radial networks, plain matrix products on the edges: eqaccel's beside torch's."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from eqaccel import MatrixProduct, MatrixProductSpec
from eqaccel.benchmarks import pictures, report, suite
from eqaccel.benchmarks.timing import measure
from eqaccel.families.matrix_product import Factors

LAYERS: dict[str, tuple[int, int, int]] = {
    "mp0-hidden": (158000, 64, 64),
    "mp0-first": (158000, 64, 512),
    "mp0-second": (158000, 64, 1280),
    "nequip-water": (444716, 128, 320),
    "nequip-l-hidden": (158000, 128, 128),
    "nequip-l": (158000, 128, 1312),
}
"""Edges, and the inputs and outputs of a layer; those that end a network have the name of the tensor product."""

_CHECKED = 4096
"""Rows that are compared with float64."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    report.add_arguments(parser)
    parser.add_argument("--layers", type=suite.names(LAYERS), default=",".join(LAYERS))
    parser.add_argument("--rows", type=int, help="instead of the edges of each layer")
    parser.add_argument("--factors", choices=[str(factors) for factors in Factors], default=str(Factors.SPLIT))
    parser.add_argument("--repetitions", type=int, default=20)


def run(arguments: argparse.Namespace) -> report.Results:
    """Times each layer forward, and backward: the gradient of its input."""
    torch.set_num_threads(arguments.threads)
    results = report.new_results("matrices", arguments)
    product = MatrixProduct(MatrixProductSpec(arguments.factors))
    implementations = {"eqaccel": product.to(arguments.device), "torch": torch.mm}
    for layer in arguments.layers:
        edges, inputs, outputs = LAYERS[layer]
        for direction, terms, columns in (("forward", inputs, outputs), ("backward", outputs, inputs)):
            shape = (arguments.rows or edges, terms, columns)
            row = {"layer": layer, "direction": direction, "shape": shape}
            results["rows"] += [row | found for found in _compare(implementations, shape, arguments)]
    return results


def _compare(
    implementations: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]],
    shape: tuple[int, int, int],
    arguments: argparse.Namespace,
) -> list[dict[str, Any]]:
    rows, terms, columns = shape
    options = {"device": arguments.device, "dtype": getattr(torch, arguments.dtype)}
    generator = torch.Generator(arguments.device).manual_seed(0)
    a = torch.randn(rows, terms, generator=generator, **options)
    b = torch.randn(terms, columns, generator=generator, **options)
    exact, size = a[:_CHECKED].double() @ b.double(), a[:_CHECKED].double().abs() @ b.double().abs()
    timings = measure(
        {name: lambda product=product: lambda: product(a, b) for name, product in implementations.items()},
        arguments.device,
        arguments.repetitions,
    )
    found = []
    for name, product in implementations.items():
        timing = timings[name]
        if isinstance(timing, str):
            found.append({"implementation": name, "note": timing})
            continue
        error = ((product(a, b)[:_CHECKED] - exact) / size).square().mean().sqrt()
        rate = 2e-9 * rows * terms * columns / timing.median
        found.append({"implementation": name, "note": "", "error": float(error), "tflops": rate, **timing.to_json()})
    return found


def format_table(results: report.Results) -> str:
    """A line for each layer and direction."""
    header = ["layer", "rows x terms x columns", "eqaccel: ms, TFLOP/s, error", "torch: ms, TFLOP/s, error", "speed-up"]
    lines = []
    for eqaccel, torch_ in _pairs(results):
        cells = [
            row["note"] or f"{row['median_ms']:.3f}, {row['tflops']:.1f}, {row['error']:.1e}"
            for row in (eqaccel, torch_)
        ]
        known = not (eqaccel["note"] or torch_["note"])
        gain = f"{torch_['median_ms'] / eqaccel['median_ms']:.2f}x" if known else "-"
        name, shape = f"{eqaccel['layer']} {eqaccel['direction']}", " x ".join(map(str, eqaccel["shape"]))
        lines.append([name, shape, *cells, gain])
    return report.table(lines, header)


def draw(results: report.Results, path: Path) -> list[Path]:
    """Bars for each layer and direction."""
    pairs = [pair for pair in _pairs(results) if not any(row["note"] for row in pair)]
    names = [f"{eqaccel['layer']} {eqaccel['direction']}" for eqaccel, _ in pairs]
    series = {name: [pair[n]["tflops"] for pair in pairs] for n, name in enumerate(("eqaccel", "torch"))}
    return pictures.grouped(results, path, names, series, "TFLOP/s", "Layers of radial networks", log=False)


def _pairs(results: report.Results) -> list[tuple[report.Row, report.Row]]:
    rows = results["rows"]
    return list(zip(rows[::2], rows[1::2], strict=True))

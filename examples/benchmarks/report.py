"""Results as JSON, as a table and as a picture, and the facts of the machine that they belong to."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import eqaccel

_PACKAGES = ("e3nn", "mace-torch", "cuequivariance", "cuequivariance-torch", "openequivariance", "numpy", "ase")
_COLOURS = ("#0b6e99", "#5fb3ce", "#d1495b", "#edae49", "#7a5195", "#8f8f8f", "#66a182", "#b07aa1")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that all benchmarks share."""
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of torch on the CPU")
    parser.add_argument("--json", type=Path, help="file to write all results to")
    parser.add_argument("--markdown", type=Path, help="file to write the table to")
    parser.add_argument("--plot", type=Path, help="picture to draw")


def environment(device: str, threads: int) -> dict[str, Any]:
    """Where and with what the results were obtained."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "eqaccel": eqaccel.__version__}
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else _processor(),
        "versions": versions | {name: version(name) for name in _PACKAGES},
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "threads": threads,
        # Above one for each thread used, others had a part of the processor and the times are too long.
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def version(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def table(rows: Sequence[Sequence[object]], header: Sequence[str]) -> str:
    """A Markdown table whose columns line up in a terminal too; the first column is text, the rest may be numbers."""
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def heading(results: Mapping[str, Any]) -> str:
    """One paragraph that says what the table below it was measured on."""
    facts = results["environment"]
    found = ", ".join(f"{name} {number}" for name, number in facts["versions"].items() if number)
    roofline = results.get("roofline", {})
    limits = ", ".join(f"{name} {value:.0f}" for name, value in roofline.items() if value)
    parts = [facts["device"], f"{facts['threads']} threads", results["dtype"], found, f"commit {facts['commit']}"]
    if facts["load_average"] is not None:
        parts.append(f"load {facts['load_average']:.1f}")
    return "; ".join([*parts, facts["date"], *([limits] if limits else [])])


def publish(results: Mapping[str, Any], text: str, arguments: argparse.Namespace) -> None:
    """Prints the table, and writes the files that were asked for except the picture."""
    print(text)
    if arguments.json:
        _write(arguments.json, json.dumps(results, indent=1) + "\n")
    if arguments.markdown:
        _write(arguments.markdown, text + "\n")


def plot_bars(
    path: Path,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    label: str,
    title: str,
    floors: Sequence[float] | None = None,
) -> None:
    """Draws groups of bars on a logarithmic axis, and a line across each group where its floor is.

    Args:
        path: Picture to write.
        groups: A name for each group.
        series: For each series a value for each group, None where there is none.
        label: Of the axis.
        title: Above the picture.
        floors: A value for each group.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(max(6.0, 0.28 * len(groups) * (len(series) + 1) + 2), 4.2))
    width = 0.85 / max(len(series), 1)
    for number, (name, values) in enumerate(series.items()):
        known = [(i, value) for i, value in enumerate(values) if value is not None]
        left = [i + (number - (len(series) - 1) / 2) * width for i, _ in known]
        axes.bar(left, [value for _, value in known], width, label=name, color=_COLOURS[number % len(_COLOURS)])
    for i, floor in enumerate(floors or ()):
        axes.hlines(floor, i - 0.45, i + 0.45, color="black", linewidth=1, label=None if i else "roofline")
    axes.set_yscale("log")
    axes.set_ylabel(label)
    axes.set_title(title, fontsize=9)
    axes.set_xticks(range(len(groups)), groups, rotation=30, ha="right", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of the checkout that this file is in, marked if files that git knows differ from it."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None

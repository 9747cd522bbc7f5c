"""Tables and pictures of whole models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eqaccel.benchmarks import pictures, report
from eqaccel.benchmarks.families import FAMILIES


def format_tables(results: report.Results) -> str:
    """Times of the models and of their convolutions, and of the compiler."""

    def cell(found: Mapping[str, Any]) -> str:
        return f"{found['median_ms']:.2f} ({found['ratio']:.2f}x)" if "ratio" in found else found.get("note", "-")

    gpu = results["environment"]["gpu"]
    lines = []
    for row in results["rows"]:
        sizes = f", {row['atoms']}/{row['edges']}" if row["atoms"] else ""
        cells = [f"{row['model']}{sizes}", row["implementation"], cell(row.get("call", {}))]
        cells.append(f"{row['speedup']:.2f}x" if "speedup" in row else "-")
        if gpu:
            peak = row.get("call", {}).get("peak_bytes")
            cells += [cell(row.get("replayed", {})), f"{row['device_ms']:.2f}" if row.get("device_ms") else "-"]
            cells.append(f"{peak / 1e9:.2f}" if peak else "-")
        cells += [cell(row.get(part, {})) for part in ("forward", "backward")]
        cells.append(f"{100 * row['convolution_share']:.0f} %" if "convolution_share" in row else "-")
        differences = [row[key] for key in ("energy_difference", "force_difference") if key in row]
        cells.append(", ".join(f"{difference:.0e}" for difference in differences) or "-")
        lines.append([*cells, row["note"]])
    header = ["model, atoms/edges", "implementation", "energy and forces, ms", "speed-up"]
    header += ["replayed, ms", "its kernels, ms", "peak memory, GB"] if gpu else []
    header += ["convolutions forward, ms", "backward, ms", "share of the call"]
    header += ["difference of energy, forces", "note"]
    parts = ["In brackets: times that of eqaccel. Speed-up: over the unpatched model.", report.table(lines, header)]
    compiled = [
        [f"{backend} {state}", f"{found[state]['codegen_s']:.2f}", f"{found[state]['compile_s']:.2f}"]
        if "note" not in found
        else [backend, found["note"], "-"]
        for backend, found in results["compile"].items()
        for state in (("cold", "warm") if "note" not in found else ("",))
    ]
    if compiled:
        parts.append(
            "Seconds to write and compile the kernels of all models, forward and backward, in a fresh process:"
        )
        parts.append(report.table(compiled, ["cache", "write, s", "compile, s"]))
    return "\n\n".join(parts)


def compact(results: report.Results) -> str:
    """A line for each model and structure, a column for each implementation."""
    names = list(dict.fromkeys(row["implementation"] for row in results["rows"]))
    cases: dict[str, dict[str, Any]] = {}
    for row in results["rows"]:
        family = FAMILIES[row["model"]]
        case = f"{family.title} {family.short(row['model'])}"
        case += f", {row['atoms']} atoms, {row['edges']} edges" if row["atoms"] else ""
        cases.setdefault(case, {})[row["implementation"]] = row.get("call", {})

    def cell(found: Mapping[str, Any]) -> str:
        if "median_ms" not in found:
            return "-"
        return f"{found['median_ms']:.1f} ms" + (f" ({found['ratio']:.1f}x)" if found.get("ratio", 1) != 1 else "")

    lines = [[case, *(cell(found.get(name, {})) for name in names)] for case, found in cases.items()]
    return report.table(lines, ["energy and forces", *names])


def draw(results: report.Results, path: Path) -> list[Path]:
    """Bars of the whole call and of the convolutions."""
    rows = [row for row in results["rows"] if row["atoms"]]
    cases = list(dict.fromkeys((row["model"], row["atoms"]) for row in rows))
    names = dict.fromkeys(row["implementation"] for row in rows)
    known = {(row["model"], row["atoms"], row["implementation"]): row for row in rows}
    parts = {"call": "energy, forces", "replayed": "replayed", "forward": "conv. forward", "backward": "conv. backward"}
    parts = {part: what for part, what in parts.items() if any(part in row for row in rows)}
    groups = [f"{model} {atoms}: {what}" for model, atoms in cases for what in parts.values()]
    series = {
        name: [known.get((*case, name), {}).get(part, {}).get("median_ms") for case in cases for part in parts]
        for name in names
    }
    families = dict.fromkeys(FAMILIES[model].title for model, _ in cases)
    return pictures.grouped(
        results, path, groups, series, "milliseconds", f"{' and '.join(families)}, energy and forces"
    )

"""Tables and pictures of steps of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eqaccel.benchmarks import pictures, report
from eqaccel.benchmarks.contests import FULL
from eqaccel.benchmarks.families import FAMILIES


def format_table(results: report.Results) -> str:
    """Every contender on every batch."""
    gpu = results["environment"]["gpu"]
    own = _own(results)
    lines = []
    for row in results["rows"]:
        sizes = f", {row['atoms']}/{row['edges']}" if row["atoms"] else ""
        cells = [f"{row['model']}, {row['system'] or '-'}{sizes}", row["implementation"], *_times(row, own)]
        if gpu:
            cells += [f"{row['launches']}", f"{row['device_ms']:.2f}"] if "launches" in row else ["-", "-"]
        cells.append(str(row.get("operators", "-")))
        differences = [row[key] for key in ("loss_difference", "gradient_difference") if key in row]
        part = row.get("parameters_compared", 1)
        differences = ", ".join(f"{difference:.0e}" for difference in differences) or "-"
        cells.append(differences + (f" (of {100 * part:.0f} %)" if part < 1 else ""))
        lines.append([*cells, row["note"]])
    header = ["model, system, atoms/edges", "implementation", "step, ms", "10 to 90 %, ms", "peak memory, MB"]
    header += ["launches", "their time, ms"] if gpu else []
    header += ["calls of operators", "difference of loss, gradients", "note"]
    return "In brackets: times that of eqaccel.\n\n" + report.table(lines, header)


def compact(results: report.Results) -> str:
    """A line for each batch, a column for each contender."""
    names = list(dict.fromkeys(row["implementation"] for row in results["rows"]))
    own = _own(results)
    cases: dict[tuple[str, str], dict[str, report.Row]] = {}
    for row in results["rows"]:
        if row["system"]:
            cases.setdefault((row["model"], row["system"]), {})[row["implementation"]] = row

    def cell(row: report.Row | None) -> str:
        if row is None or "step" not in row:
            return FULL if row is not None and FULL in row["note"] else "-"
        return f"{row['step']['median_ms']:.1f} ms{_ratio(row, own) if row['implementation'] != 'eqaccel' else ''}"

    lines = []
    for (model, system), rows in cases.items():
        family = FAMILIES[model]
        atoms = next((f", {row['atoms']} atoms" for row in rows.values() if row["atoms"]), "")
        title = f"{family.title} {family.short(model)}, {system.partition('-')[0]}{atoms}"
        lines.append([title, *(cell(rows.get(name)) for name in names)])
    return report.table(lines, ["a step of training", *names])


def draw(results: report.Results, path: Path) -> list[Path]:
    """Bars of times, and of memory."""
    rows = [row for row in results["rows"] if "step" in row]
    cases = list(dict.fromkeys((row["model"], row["system"]) for row in rows))
    known = {(row["model"], row["system"], row["implementation"]): row["step"] for row in rows}
    groups = [f"{model} {system}" for model, system in cases]
    names = dict.fromkeys(row["implementation"] for row in rows)

    def bars(key: str, factor: float) -> dict[str, list[Any]]:
        values = {name: [known.get((*case, name), {}).get(key) for case in cases] for name in names}
        return {name: [value and factor * value for value in found] for name, found in values.items()}

    if not cases:
        return []
    beside = path.with_name(f"{path.stem}_memory{path.suffix}")
    title = "A step of training"
    return [
        *pictures.grouped(results, path, groups, bars("median_ms", 1.0), "milliseconds", title),
        *pictures.grouped(results, beside, groups, bars("peak_bytes", 1e-6), "peak memory, MB", title, log=False),
    ]


def _own(results: report.Results) -> dict[tuple[str, str], float]:
    rows = (row for row in results["rows"] if row["implementation"] == "eqaccel" and "step" in row)
    return {(row["model"], row["system"]): row["step"]["median_ms"] for row in rows}


def _ratio(row: report.Row, own: dict[tuple[str, str], float]) -> str:
    case = (row["model"], row["system"])
    return f" ({row['step']['median_ms'] / own[case]:.2f}x)" if case in own else ""


def _times(row: report.Row, own: dict[tuple[str, str], float]) -> list[str]:
    """From milliseconds to memory."""
    if "step" not in row:
        return ["-"] * 3
    step = row["step"]
    times = [f"{step['median_ms']:.2f}{_ratio(row, own)}", f"{step['p10_ms']:.2f} to {step['p90_ms']:.2f}"]
    return [*times, f"{step['peak_bytes'] / 1e6:.0f}" if "peak_bytes" in step else "-"]

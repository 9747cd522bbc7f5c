"""Tables and pictures of whole steps of molecular dynamics."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eqaccel.benchmarks import pictures, report
from eqaccel.benchmarks.contests import FULL
from eqaccel.benchmarks.families import FAMILIES

_PARTS = {"device_ms": "device", "host_ms": "host", "neighbours_ms": "lists of neighbours"}


def format_table(results: report.Results) -> str:
    """Every contender on every system."""
    gpu = results["environment"]["gpu"]
    own = _medians(results, "eqaccel")
    lines = []
    for row in results["rows"]:
        cells = [f"{row['model']}, {row['system'] or '-'}", row["implementation"], *_times(row, own)]
        if gpu:
            peak = row.get("step", {}).get("peak_bytes")
            cells.append(f"{peak / 1e9:.2f}" if peak else "-")
            cells.append(" + ".join(f"{row['parts'][part]:.2f}" for part in _PARTS) if "parts" in row else "-")
        cells.append(f"{row['rebuilds']}, {sum(row['captures'].values())}" if "rebuilds" in row else "-")
        cells.append(f"{row['force_difference']:.0e}" if "force_difference" in row else "-")
        lines.append([*cells, row["note"]])
    header = ["model, system", "implementation", "step, ms", "10 to 90 %, ms", "ns a day", "atoms a second"]
    header += ["first step, s", "setup, s"]
    header += ["peak memory, GB", f"{', '.join(_PARTS.values())}, ms"] if gpu else []
    header += ["lists, recordings", "difference of forces", "note"]
    return "In brackets: times that of eqaccel.\n\n" + report.table(lines, header)


def compact(results: report.Results) -> str:
    """A line for each system, a column for each contender."""
    names = list(dict.fromkeys(row["implementation"] for row in results["rows"]))
    own, medians = _medians(results, "eqaccel"), {name: _medians(results, name) for name in names}
    cases = dict.fromkeys((row["model"], row["system"]) for row in results["rows"] if row["system"])
    notes = {(row["model"], row["system"], row["implementation"]): row["note"] for row in results["rows"]}

    def cell(case: tuple[str, str], name: str) -> str:
        if case not in medians[name]:
            return FULL if FULL in notes.get((*case, name), "") else "-"
        ratio = f" ({medians[name][case] / own[case]:.1f}x)" if name != "eqaccel" and case in own else ""
        return f"{medians[name][case]:.2f} ms{ratio}"

    lines = []
    for model, system in cases:
        family = FAMILIES[model]
        title = f"{family.title} {family.short(model)}, {system.replace('-', ' ')}"
        lines.append([title, *(cell((model, system), name) for name in names)])
    return report.table(lines, ["a step of molecular dynamics", *names])


def draw(results: report.Results, path: Path) -> list[Path]:
    """Milliseconds a step and ns a day over atoms, and where the time of eqaccel's steps goes."""
    timed = [row for row in results["rows"] if "step" in row]
    if not timed:
        return []
    series = list(dict.fromkeys((row["model"], row["system"].partition("-")[0]) for row in timed))
    lines = {
        f"{model}, {kind}": [row for row in timed if (row["model"], row["system"].partition("-")[0]) == (model, kind)]
        for model, kind in series
    }
    values = {"ms a step": lambda row: row["step"]["median_ms"], "ns a day": lambda row: row["ns_per_day"]}
    several = {title: rows for title, rows in lines.items() if len({row["atoms"] for row in rows}) > 1}
    panels = [
        [(f"{title}: {what}", _points(rows, value)) for what, value in values.items()]
        for title, rows in (several or lines).items()
    ]
    written = [pictures.over_atoms(results, path, panels, "ASE VelocityVerlet")]
    split = [row for row in timed if "parts" in row]
    if split:
        groups = [f"{row['model']} {row['system']}" for row in split]
        shares = {
            what: [100 * row["parts"][part] / sum(row["parts"].values()) for row in split]
            for part, what in _PARTS.items()
        }
        totals = [f"{sum(row['parts'].values()):.2f} ms" for row in split]
        beside = path.with_name(f"{path.stem}_parts{path.suffix}")
        written.append(pictures.stacked(results, beside, groups, shares, totals, "% of a step", "A step of eqaccel"))
    return written


def _points(rows: Sequence[report.Row], value: Any) -> dict[str, list[tuple[float, float]]]:
    """Atoms and a value, of each contender."""
    names = dict.fromkeys(row["implementation"] for row in rows)
    return {name: sorted((r["atoms"], value(r)) for r in rows if r["implementation"] == name) for name in names}


def _medians(results: report.Results, implementation: str) -> dict[tuple[str, str], float]:
    rows = (row for row in results["rows"] if row["implementation"] == implementation and "step" in row)
    return {(row["model"], row["system"]): row["step"]["median_ms"] for row in rows}


def _times(row: report.Row, own: dict[tuple[str, str], float]) -> list[str]:
    """From milliseconds to seconds of the setup."""
    if "step" not in row:
        return ["-"] * 6
    step, case = row["step"], (row["model"], row["system"])
    ratio = f" ({step['median_ms'] / own[case]:.2f}x)" if case in own else ""
    times = [f"{step['median_ms']:.2f}{ratio}", f"{step['p10_ms']:.2f} to {step['p90_ms']:.2f}"]
    times += [f"{row['ns_per_day']:.2f}", f"{row['atoms_per_s']:.3g}"]
    return [*times, f"{row['first_s']:.2f}", f"{row['setup_s']:.1f}"]

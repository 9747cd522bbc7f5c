"""Results as JSON and as Markdown tables, and the facts of the machine that they belong to."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import eqaccel
from eqaccel.codegen import COMMON

DIRECTIONS = {direction.value: direction for direction in COMMON}
"""Forward, backward and double backward, by the names they have on the command line and in results."""

_PACKAGES = (
    "e3nn",
    "mace-torch",
    "nequip",
    "sevenn",
    "cuequivariance",
    "cuequivariance-torch",
    "openequivariance",
    "numpy",
    "ase",
)
_SHORT = {"cuEquivariance": "cuE", "OpenEquivariance": "OEQ"}

Results = dict[str, Any]
Row = Mapping[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that all benchmarks share."""
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of torch on the CPU")
    parser.add_argument("--commit", help="to note in the results; default: that of the checkout it is run in")
    add_outputs(parser)


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Where results go, besides the terminal."""
    parser.add_argument("--json", type=Path, help="file to write all results to, from time to time during the run too")
    parser.add_argument("--markdown", type=Path, help="file to write the table to")
    parser.add_argument("--plot", type=Path, help="picture to draw; further ones get names that begin with this one's")


def new_results(benchmark: str, arguments: argparse.Namespace) -> Results:
    """Results without rows: which benchmark this is, and where and with what it ran."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "eqaccel": eqaccel.__version__}
    return {
        "benchmark": benchmark,
        "environment": {
            "device": torch.cuda.get_device_name() if arguments.device == "cuda" else _processor(),
            "gpu": arguments.device == "cuda",
            "versions": versions | {name: version(name) for name in _PACKAGES},
            "commit": arguments.commit or _commit(),
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "threads": arguments.threads,
            # Above one for each thread used, others had a part of the processor and the times are too long.
            "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        },
        "dtype": arguments.dtype,
        "rows": [],
    }


def version(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def load(files: Iterable[Path]) -> Results:
    """Joins the results of one benchmark that was run in pieces; of equal rows the last one counts.

    A case that one piece did not begin, for lack of time or of a library, is dropped if another piece has it. Whatever
    is said of a whole run is that of the last piece; rows of other commits keep theirs.

    Raises:
        ValueError: If the files do not belong together.
    """
    parts = [json.loads(file.read_text()) for file in files]
    for name, key in (("benchmark", "benchmark"), ("dtype", "dtype"), ("device", "environment")):
        found = {part[key]["device"] if key == "environment" else part[key] for part in parts}
        if len(found) > 1:
            raise ValueError(f"results: expected files of one {name}, got {', '.join(map(str, sorted(found)))}")
    names = (
        "model",
        "atoms",
        "problem",
        "graph",
        "edges",
        "layer",
        "direction",
        "implementation",
        "shared_kib",
        "system",
    )
    rows = {}
    for part in parts:
        for row in part["rows"]:
            commit = row.pop("commit", part["environment"]["commit"])
            if commit != parts[-1]["environment"]["commit"]:
                row["commit"] = commit
            key = tuple(row.get(name) for name in names)
            if row.get("begun", True) or key not in rows:
                rows[key] = row

    def case(row: Row) -> tuple[Any, ...]:
        known = ["model", "problem", "graph", "shared_kib"]
        # Only these rows tell what each implementation did not begin.
        known += ["system", "implementation"] if row.get("system") else []
        return tuple(row.get(key) for key in known)

    begun = {case(row) for row in rows.values() if row.get("begun", True)}
    kept = [row for row in rows.values() if row.get("begun", True) or case(row) not in begun]
    return parts[-1] | {"rows": kept}


def table(rows: Sequence[Sequence[object]], header: Sequence[str]) -> str:
    """A Markdown table whose columns line up in a terminal too; the first column is text, the rest may be numbers."""
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def heading(results: Results) -> str:
    """One paragraph that says what the table below it was measured on."""
    facts = results["environment"]
    found = ", ".join(f"{name} {number}" for name, number in facts["versions"].items() if number)
    limits = ", ".join(f"{name} {value:.0f}" for name, value in results.get("roofline", {}).items() if value)
    parts = [facts["device"], f"{facts['threads']} threads", results["dtype"], found, f"commit {_commits(results)}"]
    if facts.get("load_average") is not None:
        parts.append(f"load {facts['load_average']:.1f}")
    if facts.get("device_time"):
        parts.append("times of the device alone")
    return "; ".join([*parts, facts["date"], *([limits] if limits else [])])


def _commits(results: Results) -> str:
    """The commit of the results, and what was measured at others."""
    others: dict[str, dict[str, None]] = {}  # names in order, each once
    for row in results["rows"]:
        if "commit" in row:
            name = next(row[key] for key in ("model", "problem", "layer", "implementation") if row.get(key))
            others.setdefault(row["commit"], {})[name] = None
    found = (f"of {commit}: {', '.join(names)}" for commit, names in others.items())
    return "; ".join([str(results["environment"]["commit"]), *found])


def product_table(results: Results) -> str:
    """Every row of timed tensor products: milliseconds, shares of the limits, ratios, memory, errors and notes."""
    rows, gpu = results["rows"], results["environment"]["gpu"]
    use = "(% of floor)" if gpu else "(% of FMA peak, of DRAM)"
    known = [name for name in DIRECTIONS if any(name in row for row in rows)]
    header = ["graph", "problem", "implementation"]
    for name in known:
        header += [f"{name.replace('_', ' ')}, ms {use}", "ratio"]
    lines = []
    for row in rows:
        cells = [f"{row['graph']} {row['nodes']}/{row['edges']}", row["problem"], row["implementation"]]
        for name in known:
            if name not in row:
                cells += ["-", "-"]
                continue
            found = row[name]
            shares = [found[key] for key in ("of_arithmetic", "of_memory") if key in found]
            cells.append(f"{found['median_ms']:.3f} ({', '.join(f'{100 * share:.0f}' for share in shares)})")
            cells.append("-" if found["ratio"] is None else f"{found['ratio']:.2f}")
        if gpu:
            cells.append(", ".join(_times(row[name]) for name in known if name in row) or "-")
        lines.append([*cells, f"{row['error']:.0e}" if "error" in row else "-", row["note"]])
    return table(lines, [*header, *(["memory, x floor"] if gpu else []), "error", "note"])


def compact_table(results: Results) -> str:
    """Where eqaccel stands: its deterministic mode against the best variant of any peer, and against the floor.

    One line for each problem, on the graph that most of them ran on, and the medians over the problems on every graph.
    """
    cases: dict[str, dict[str, list[Row]]] = {}
    for row in results["rows"]:
        cases.setdefault(row["graph"], {}).setdefault(row["problem"], []).append(row)
    if not cases:
        return "No rows."
    known = [name for name in DIRECTIONS if any(name in row for row in results["rows"])]
    header = [f"{name.replace('_', ' ')}: ms, % of floor, best peer" for name in known]
    first = max(cases, key=lambda graph: len(cases[graph]))
    lines = [[problem, *(_standing(rows, name) for name in known)] for problem, rows in cases[first].items()]
    text = table(lines, [f"problem, on {first}", *header])
    medians = [
        [graph, *(_median_standing(list(problems.values()), name) for name in known)]
        for graph, problems in cases.items()
    ]
    return "\n\n".join([text, table(medians, ["median over problems", *(name.replace("_", " ") for name in known)])])


def best(rows: Iterable[Row], direction: str, families: Iterable[str] | None = None) -> Row | None:
    """The row of the fastest variant in a direction, of some families of implementations or of any."""
    wanted = None if families is None else set(families)
    timed = [row for row in rows if direction in row and (wanted is None or family(row) in wanted)]
    return min(timed, key=lambda row: row[direction]["median_ms"], default=None)


def family(row: Row) -> str:
    """Which library an implementation belongs to: eqaccel, e3nn, cuEquivariance or OpenEquivariance."""
    return row["implementation"].split()[0]


def share_of_floor(found: Mapping[str, float]) -> float:
    """The least time that the machine allows over the time measured."""
    return max(value for key, value in found.items() if key.startswith("of_"))


def publish(results: Results, text: str, arguments: argparse.Namespace) -> None:
    """Prints the table, and writes the files that were asked for except the picture."""
    print(text)
    if arguments.json:
        write(arguments.json, json.dumps(results, indent=1) + "\n")
    if arguments.markdown:
        write(arguments.markdown, text + "\n")


def write(path: Path, text: str) -> None:
    """Writes a file, and its folder if need be; a file is never seen half-written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def _standings(rows: Sequence[Row], direction: str) -> tuple[Row, Row | None] | None:
    own = best([row for row in rows if not _is_atomic(row)], direction, ["eqaccel"])
    if own is None:
        return None
    return own, best(rows, direction, {family(row) for row in rows} - {"eqaccel"})


def _standing(rows: Sequence[Row], direction: str) -> str:
    found = _standings(rows, direction)
    if found is None:
        return next((row["note"].partition(":")[0] for row in rows if row["note"]), "-")
    own, peer = found
    cell = f"{own[direction]['median_ms']:.3f}, {100 * share_of_floor(own[direction]):.0f} %"
    if peer is None:
        return cell
    ratio = peer[direction]["median_ms"] / own[direction]["median_ms"]
    cell = f"{cell}, **{ratio:.1f}x** {_SHORT.get(family(peer), family(peer))}"
    atomic = best([row for row in rows if _is_atomic(row)], direction, ["eqaccel"])
    if atomic is None or direction == "forward":
        return cell
    ratio = peer[direction]["median_ms"] / atomic[direction]["median_ms"]
    return f"{cell}; atomic {atomic[direction]['median_ms']:.3f}, {ratio:.1f}x"


def _is_atomic(row: Row) -> bool:
    """Whether gradients of x were added in no fixed order; peers are compared in whatever order is fastest for them."""
    return "atomic" in row["implementation"]


def _median_standing(cases: Sequence[Sequence[Row]], direction: str) -> str:
    found = [pair for pair in (_standings(rows, direction) for rows in cases) if pair is not None]
    shares = [share_of_floor(own[direction]) for own, _ in found]
    ratios = [peer[direction]["median_ms"] / own[direction]["median_ms"] for own, peer in found if peer is not None]
    parts = [f"{100 * statistics.median(shares):.0f} %"] if shares else []
    parts += [f"**{statistics.median(ratios):.1f}x** (least {min(ratios):.1f}x)"] if ratios else []
    return ", ".join(parts) or "-"


def _times(found: Mapping[str, Any]) -> str:
    return f"{found['peak_bytes'] / found['floor_bytes']:.1f}" if "peak_bytes" in found else "-"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of the checkout of eqaccel that this is run in, marked if files that git knows differ from it."""
    if not Path("eqaccel", "__main__.py").exists():
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None

"""Writes where eqaccel stands, from the files in `results/`, between the markers of two texts.

`docs/performance.md` gets a section of every result, the README one table and one picture: steps of dynamics.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eqaccel.benchmarks.command import BENCHMARKS
from eqaccel.benchmarks.families import FAMILIES
from eqaccel.benchmarks.report import load, table

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parents[2] / "README.md"
DOCS = README.parent / "docs" / "performance.md"
BEGIN = "<!-- speed: written by examples/benchmarks/summary.py -->"
END = "<!-- end of speed -->"

_TITLES = {
    "step": "Steps of molecular dynamics with {library}",
    "batches": "Steps of torch-sim's dynamics with {library}",
    "models": "Whole {library} models",
    "training": "Steps of training {library}",
    "kernels": "Fused convolution",
    "batch": "Tensor product without a graph",
    "graphs": "Convolutions on many graphs",
    "scaling": "More and more edges",
    "machines": "Kernels of smaller GPUs",
    "overhead": "What a call costs the host",
    "matrices": "Layers of radial networks",
    "modules": "Modules of e3nn outside of interatomic potentials",
    "precision": "Errors of lower precision",
}

PICTURE = "step_h200_float32.png"
"""The one picture of the README."""


def device(results: dict[str, Any]) -> str:
    """What a run was made on."""
    facts = results["environment"]
    return facts["device"] if facts["gpu"] else f"{facts['device']}, threads: {facts['threads']}"


def link(path: Path, text: Path) -> str:
    """A path as a text in another folder names it."""
    return Path(os.path.relpath(path, text.parent)).as_posix()


def section(file: Path) -> str:
    """One result file: what it is, a short table, and where the rest is."""
    results = load([file])
    facts = results["environment"]
    libraries = {family.title for family in FAMILIES.values()}
    library = next((title for title in libraries if f"_{title.lower()}_" in file.name), "MACE")
    kind = _TITLES[results["benchmark"]].format(library=library)
    if any("LAMMPS" in row["implementation"] for row in results["rows"]):
        kind += ", in ASE and in LAMMPS"
    elif results["benchmark"] == "step" and len({row["implementation"] for row in results["rows"]}) == 1:
        kind += ", by eqaccel alone"
    title = f"{kind}: {device(results)}, {results['dtype']}"
    picture = file.with_suffix(".png")
    shown = [f"![{title}]({link(picture, DOCS)})"] if picture.exists() else []
    links = [("everything", ".md"), ("roofline", "_roofline.png"), ("speed-up", "_speedup.png")]
    links += [("parts of a step", "_parts.png"), ("memory", "_memory.png")]
    found = [
        f"[{what}]({link(path, DOCS)})"
        for what, path in ((what, file.with_name(file.stem + end)) for what, end in links)
        if path.exists()
    ]
    rest = f"Commit {facts['commit']}, {facts['date'][:10]}; {', '.join(found)}."
    return "\n\n".join([f"## {title}", BENCHMARKS[results["benchmark"]].compact(results), *shown, rest])


def simulations(files: Sequence[Path]) -> str:
    """Steps of molecular dynamics before and after `eqaccel.patch`, on every device, in one table and one picture."""
    lines = []
    for results in (load([file]) for file in files):
        rows = {(row["model"], row["system"], row["implementation"]): row for row in results["rows"] if "step" in row}
        for (model, system, name), row in rows.items():
            if name != "eqaccel" or (model, system, "e3nn") not in rows:
                continue
            family, (kind, atoms) = FAMILIES[model], system.split("-")
            times = {
                peer: found["step"]["median_ms"] for (*case, peer), found in rows.items() if case == [model, system]
            }
            after, before = times.pop("eqaccel"), times.pop("e3nn")
            others = [peer for peer in times if not peer.startswith("eqaccel")]
            best = min(others, key=lambda peer: times[peer], default=None)
            lines.append(
                [
                    f"{family.title} {family.short(model)}, {atoms} atoms of {kind}",
                    device(results),
                    f"{before:.1f} ms",
                    "-" if best is None else f"{times[best]:.1f} ms {best}",
                    f"{after:.1f} ms",
                    f"**{before / after:.1f}x**",
                    f"{row['ns_per_day']:.1f}",
                ]
            )
    step = "a step of molecular dynamics in ASE, float32"
    header = [step, "device", "as it comes", "best other library", "patched", "speed-up", "ns a day"]
    picture = RESULTS / PICTURE
    shown = [f"![Steps of molecular dynamics]({link(picture, README)})"] if picture.exists() else []
    return "\n\n".join([table(lines, header), *shown])


def write(file: Path, parts: Sequence[str]) -> None:
    """Replaces what stands between the markers of a text."""
    text = file.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    file.write_text("\n\n".join([before + BEGIN, *parts, END + after]))


def main() -> None:
    """Writes both texts; what matters most comes first."""
    order = list(_TITLES)
    files = sorted(RESULTS.glob("*.json"), key=lambda file: (order.index(load([file])["benchmark"]), file.name))
    write(DOCS, [section(file) for file in files])
    write(README, [simulations([file for file in files if load([file])["benchmark"] == "step"])])


if __name__ == "__main__":
    main()

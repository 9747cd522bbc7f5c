"""Writes where eqaccel stands, from the files in `results/`, into the README, between its two markers."""

from __future__ import annotations

from pathlib import Path

from eqaccel.benchmarks.command import BENCHMARKS
from eqaccel.benchmarks.report import load

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parents[2] / "README.md"
BEGIN = "<!-- speed: written by examples/benchmarks/summary.py -->"
END = "<!-- end of speed -->"

_TITLES = {
    "kernels": "Fused convolution",
    "batch": "Tensor product without a graph",
    "graphs": "Convolutions on many graphs",
    "scaling": "More and more edges",
    "overhead": "What a call costs the host",
    "models": "Whole MACE models",
    "matrices": "Layers of radial networks",
}
_NEQUIP = "Whole NequIP models"


def section(file: Path) -> str:
    """One result file: what it is, a short table, and where the rest is."""
    results = load([file])
    facts = results["environment"]
    device = facts["device"] if facts["gpu"] else f"{facts['device']}, threads: {facts['threads']}"
    kind = _NEQUIP if file.name.startswith("models_nequip") else _TITLES[results["benchmark"]]
    title = f"### {kind}: {device}, {results['dtype']}"
    picture = file.with_suffix(".png")
    shown = [f"![{title[4:]}]({picture.relative_to(README.parent)})"] if picture.exists() else []
    links = [("everything", ".md"), ("roofline", "_roofline.png"), ("speed-up", "_speedup.png")]
    found = [
        f"[{what}]({path.relative_to(README.parent)})"
        for what, path in ((what, file.with_name(file.stem + end)) for what, end in links)
        if path.exists()
    ]
    rest = f"Commit {facts['commit']}, {facts['date'][:10]}; {', '.join(found)}."
    return "\n\n".join([title, BENCHMARKS[results["benchmark"]].compact(results), *shown, rest])


def main() -> None:
    """Replaces what stands between the markers; what matters most comes first."""
    text = README.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    order = list(_TITLES)
    files = sorted(RESULTS.glob("*.json"), key=lambda file: (order.index(load([file])["benchmark"]), file.name))
    README.write_text("\n\n".join([before + BEGIN, *map(section, files), END + after]))


if __name__ == "__main__":
    main()

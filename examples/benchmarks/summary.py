"""Writes the tables and pictures of `results/` into the README, between its two markers."""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parents[2] / "README.md"
BEGIN = "<!-- speed: written by examples/benchmarks/summary.py -->"
END = "<!-- end of speed -->"


def section(file: Path) -> str:
    """One result file as a heading, its picture and its table."""
    results = json.loads(file.read_text())
    facts = results["environment"]
    title = f"### {file.stem.replace('_', ' ')}: {facts['device']}, commit {facts['commit']}"
    lines = [line for line in file.with_suffix(".md").read_text().splitlines() if line.startswith("|")]
    picture = f"![{file.stem}]({file.with_suffix('.png').relative_to(README.parent)})"
    return "\n".join([title, "", picture, "", *lines])


def main() -> None:
    """Replaces what stands between the markers."""
    text = README.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    sections = [section(file) for file in sorted(RESULTS.glob("*.json")) if file.with_suffix(".md").exists()]
    README.write_text("\n\n".join([before + BEGIN, *sections, END + after]))


if __name__ == "__main__":
    main()

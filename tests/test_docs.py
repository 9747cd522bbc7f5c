"""The documentation: its links lead somewhere, its settings are the ones there are, its first lines of code run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from documents import python_blocks
from folders import ROOT

from eqaccel import settings

FOLDERS = ("", "docs", "examples", "integrations", "tests")
TEXTS = sorted(
    file
    for folder in FOLDERS
    for file in ((ROOT / folder).rglob("*.md") if folder else ROOT.glob("*.md"))
    if not any(part.startswith(".") for part in file.relative_to(ROOT).parts)
)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(text: Path) -> set[str]:
    """The names under which the headings of a text can be linked to."""
    headings = re.findall(r"^#+ (.*)$", text.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: str(text.relative_to(ROOT)))
def test_links_lead_somewhere(text: Path) -> None:
    for link in LINK.findall(text.read_text()):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = (text.parent / path) if path else text
        assert target.exists(), f"{link}: there is no such file"
        assert not anchor or anchor in anchors(target), f"{link}: there is no such heading"


def test_every_chapter_is_in_the_index() -> None:
    linked = set(LINK.findall((ROOT / "docs" / "README.md").read_text()))
    chapters = {file.name for file in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert chapters <= linked


def test_every_setting_is_documented() -> None:
    text = (ROOT / "docs" / "settings.md").read_text()
    assert not [name for name in settings.VARIABLES if f"`{name}`" not in text]


@pytest.mark.parametrize("text", ["README.md", "docs/quickstart.md"])
def test_the_first_lines_of_code_run(text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """As they stand, with the example's model in place of one that `mace_mp` downloads."""
    calculators = pytest.importorskip("mace.calculators")
    example = str(ROOT / "examples" / "models" / "cuau_emt.model")

    def mace_mp(model: str, device: str, default_dtype: str) -> object:
        assert model == "medium"
        return calculators.MACECalculator(model_paths=example, device=device, default_dtype=default_dtype)

    monkeypatch.setattr(calculators, "mace_mp", mace_mp)
    exec(compile(python_blocks(text)[0], text, "exec"), {})
    assert "modules accelerated" in capsys.readouterr().out

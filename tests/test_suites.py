"""The command that runs suites of other projects: what it counts, and that their models are patched."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from folders import SUPPORT

FOLDER = Path(__file__).resolve().parent / "suites"
REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="fine"/>
<testcase classname="tests.a" name="broken"><failure message="wrong
 numbers">trace</failure></testcase>
<testcase classname="tests.a" name="fixture"><error message="no model"/></testcase>
<testcase classname="tests.a" name="left"><skipped message="no GPU"/></testcase>
<testcase classname="tests.a" name="teardown"/>
<testcase classname="tests.a" name="teardown"><error message="at the end"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def run() -> ModuleType:
    spec = importlib.util.spec_from_file_location("suites_run", FOLDER / "run.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_outcomes_are_read(run: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    assert run.read(tmp_path / "report.xml") == {
        "tests.a::fine": ("passed", ""),
        "tests.a::broken": ("failed", "wrong numbers"),
        "tests.a::fixture": ("failed", "no model"),
        "tests.a::left": ("skipped", "no GPU"),
        "tests.a::teardown": ("failed", "at the end"),
    }


def test_what_passed_has_to_pass_on_patched_models(run: ModuleType) -> None:
    plain = {"a": "passed", "b": "passed", "c": "failed", "d": "passed", "e": "passed", "f": "skipped"}
    patched = {"a": "passed", "b": "failed", "c": "failed", "d": "skipped", "f": "skipped"}
    found = run.compare(*({name: (outcome, "") for name, outcome in runs.items()} for runs in (plain, patched)))
    assert list(found["worse"]) == ["b", "d", "e"]  # one that is skipped, or not run at all, is no success
    assert found["both fail"] == ["c"]
    assert found["plain"] == {"passed": 4, "failed": 1, "skipped": 1}


def test_tables_name_faults(run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = {"title": "Their tests", "date": "2026-01-01", "versions": {"torch": "2.13"}, "plain": {"passed": 2}}
    result |= {"patched": {"passed": 1, "failed": 1}, "worse": {"tests.a::b": "wrong"}, "both fail": []}
    result |= {"patched models": 3, "left models": {"Odd: no convolution": 2}}
    (tmp_path / "one.json").write_text(json.dumps(result))
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    text = run.tables()
    assert "| Their tests | 2 | 1 | 0 | 0 | 1 | 3 |" in text
    assert "- `tests.a::b`: wrong" in text
    assert "- 2 times Odd: no convolution" in text


def test_models_are_patched_where_they_are_built_and_loaded(tmp_path: Path) -> None:
    """In a process of its own, which knows nothing of eqaccel."""
    pytest.importorskip("mace")
    code = """
import torch, mace_models
torch.save(mace_models.energy_model(), "built.model")
assert any(name.startswith("eqaccel") for name in __import__("sys").modules)
torch.load("built.model", weights_only=False)
torch.load("plain.model", weights_only=False)
"""
    plain = "import torch, mace_models; torch.save(mace_models.energy_model(), 'plain.model')"
    log = tmp_path / "models.log"
    paths = [str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]
    for text, extra in ((plain, {}), (code, {"EQACCEL_SUITES_LOG": str(log)})):
        path = os.pathsep.join([str(FOLDER / "startup"), *paths])
        environment = os.environ | {"PYTHONPATH": path} | extra
        subprocess.run([sys.executable, "-c", text], cwd=tmp_path, env=environment, check=True)
    outcomes = [line.split("\t")[1:3] for line in log.read_text().splitlines()]
    assert outcomes == [["ScaleShiftMACE", "patched"]] * 2  # the one that was built, and the plain one that was loaded

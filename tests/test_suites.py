"""The command that runs suites of other projects: what it counts, and that their models are patched."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
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


def test_messages_name_no_machine(run: ModuleType) -> None:
    command = (
        "CalledProcessError: Command '['/env/bin/python', '/home/mace/run_train.py', '--name=a']' returned status 1"
    )
    assert (
        run.shorten("Error: Command '['/env/python', '--x=... [truncated; full report in text]") == "Error: a program"
    )
    assert run.shorten(command) == "CalledProcessError: a program returned status 1"
    assert run.shorten("no file\n '/home/me/a.model' at https://a.org/b/c") == "no file 'a.model' at https://a.org/b/c"


def test_what_passed_has_to_pass_on_patched_models(run: ModuleType) -> None:
    plain = {"a": "passed", "b": "passed", "c": "failed", "d": "passed", "e": "passed", "f": "skipped"}
    patched = {"a": "passed", "b": "failed", "c": "failed", "d": "skipped", "f": "skipped"}
    found = run.compare(*({name: (outcome, "why") for name, outcome in runs.items()} for runs in (plain, patched)))
    assert list(found["worse"]) == ["b", "d", "e"]  # one that is skipped, or not run at all, is no success
    assert found["both fail"] == {"c": "why"}
    assert found["plain"] == {"passed": 4, "failed": 1, "skipped": 1}
    assert found["skipped"] == {"why": 1}


def test_parts_of_a_file_add_up(run: ModuleType) -> None:
    def part(*tests: str, **changes: object) -> dict[str, object]:
        outcomes = {test: ("skipped" if test == "s" else "passed", "why") for test in tests}
        about = {"versions": {"torch": "2"}, "options": f"-k {tests[0]}", "patched models": 2, "left models": {}}
        return about | run.compare(outcomes, outcomes) | changes

    found = run.added(part("a", "s"), part("b"))
    assert found["tests"] == ["a", "b", "s"]
    assert found["plain"] == found["patched"] == {"passed": 2, "skipped": 1}
    assert (found["skipped"], found["patched models"], found["options"]) == ({"why": 1}, 4, "-k a; -k b")
    with pytest.raises(ValueError, match=r"expected tests that are not kept yet, got \['a'\]"):
        run.added(part("a"), part("b", "a"))
    with pytest.raises(ValueError, match="use that environment"):
        run.added(part("a"), part("b", versions={"torch": "3"}))


def test_a_file_is_run_as_it_is_and_patched(run: ModuleType, tmp_path: Path) -> None:
    """The second run alone knows where to list models; a run that ends early counts as a failure."""
    file = tmp_path / "source" / "tests" / "test_theirs.py"
    file.parent.mkdir(parents=True)
    file.write_text("""import os
def test_plain(): assert "EQACCEL_SUITES_LOG" not in os.environ
def test_place(): assert os.path.basename(os.getcwd()) == "source"
""")
    found = run.outcomes(run.Suite("Their tests", "theirs", tests="tests"), file, tmp_path, [])
    assert found["versions"]["theirs"] == "not installed"
    assert found["plain"] == {"passed": 2}
    assert found["patched"] == {"passed": 1, "failed": 1}
    assert list(found["worse"]) == ["tests.test_theirs::test_plain"]
    assert found["patched models"] == 0
    file.write_text("import os\ndef test_end(): os._exit(3)\n")
    found = run.outcomes(run.Suite("Their tests", "theirs", tests="tests"), file, tmp_path, [])
    assert found["both fail"] == {"test_theirs.py": "pytest left no report and the status 3"}


@pytest.fixture
def documentation(run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page that tables are written into, and a folder of outcomes that is empty."""
    page = tmp_path / "suites.md"
    page.write_text(f"Before.\n\n{run.BEGIN}\n\nOld.\n\n{run.END}\n")
    monkeypatch.setattr(run, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(run, "DOCS", page)
    return page


RESULT = {
    "date": "2026-01-01",
    "versions": {"eqaccel": "1.0", "mace-torch": "0.3", "torch": "2.13"},
    "options": "-k 'a or b'",
    "plain": {"passed": 2, "failed": 1, "skipped": 1},
    "patched": {"passed": 1, "failed": 2},
    "worse": {"tests.a::b": "wrong"},
    "both fail": {"tests.a::c": "no network"},
    "skipped": {"no GPU": 1},
    "patched models": 3,
    "left models": {"Odd: no convolution": 2},
}


def test_tables_name_faults_and_what_was_not_run(run: ModuleType, documentation: Path) -> None:
    run.keep("mace", "test_a.py", RESULT, ["test_a.py", "test_z.py"])
    text = documentation.read_text()
    assert text.startswith(f"Before.\n\n{run.BEGIN}")
    assert text.endswith(f"{run.END}\n")
    assert "Old." not in text
    assert "| `test_a.py` | 2 | 1 | 1 | 1 | 2 | 0 | 1 | 3 |" in text
    assert "Not run: `test_z.py`." in text
    assert "- 2026-01-01, eqaccel 1.0, mace-torch 0.3, torch 2.13, `pytest -k 'a or b'`: `test_a.py`" in text
    assert "- wrong: `tests.a::b`" in text
    assert "- no network: `tests.a::c`" in text
    assert "- 1 times no GPU" in text
    assert "- 2 times Odd: no convolution" in text


def test_parts_of_the_same_versions_add_up(run: ModuleType, documentation: Path) -> None:
    files = ["test_a.py", "test_z.py"]
    for file in ("test_z.py", "test_a.py", "test_a.py"):  # the later run of a file replaces the earlier one
        run.keep("mace", file, RESULT, files)
    text = documentation.read_text()
    assert "Not run" not in text
    assert "| all | 4 | 2 | 2 | 2 | 4 | 0 | 2 | 6 |" in text
    run.keep("mace", "test_a.py", RESULT | {"versions": RESULT["versions"] | {"torch": "2.14"}}, files)
    assert "torch 2.13, `pytest -k 'a or b'`: `test_z.py`" in documentation.read_text()
    run.keep("mace", "test_a.py", RESULT | {"versions": RESULT["versions"] | {"eqaccel": "1.1"}}, files)
    assert "Not run: `test_z.py`." in documentation.read_text()


def test_models_are_patched_where_they_are_built_and_loaded(tmp_path: Path) -> None:
    """In a process of its own, which knows nothing of eqaccel."""
    pytest.importorskip("mace")
    import mace_models as mm

    torch.save(mm.energy_model(**mm.TINY), tmp_path / "plain.model")
    code = """
import torch, mace_models
torch.save(mace_models.energy_model(**mace_models.TINY), "built.model")
assert any(name.startswith("eqaccel") for name in __import__("sys").modules)
torch.load("built.model", weights_only=False)
torch.load("plain.model", weights_only=False)
"""
    log = tmp_path / "models.log"
    paths = [str(FOLDER / "startup"), str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "EQACCEL_SUITES_LOG": str(log)}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)
    outcomes = [line.split("\t")[1:3] for line in log.read_text().splitlines()]
    assert outcomes == [["ScaleShiftMACE", "patched"]] * 2  # the one that was built, and the plain one that was loaded

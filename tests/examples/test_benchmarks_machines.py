"""The benchmark of smaller GPUs' plans, without a GPU: what each process is asked, and what becomes of the answer."""

from __future__ import annotations

import argparse
import json
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from eqaccel.targets import MACHINE_CLASSES

pytestmark = pytest.mark.skipif(find_spec("scipy") is None, reason="the graphs of the benchmarks need scipy")

PROBLEMS = ["mace-large", "tiny"]
CLASSES = [target.shared_bytes // 1024 for target in MACHINE_CLASSES]


def _row(problem: str, layout: str, milliseconds: float) -> dict:
    timing = {"median_ms": milliseconds, "floor_memory_ms": 0.1}
    times = dict.fromkeys(("forward", "backward", "double_backward"), timing)
    facts = {"graph": "carbon", "nodes": 10, "edges": 100, "implementation": f"eqaccel ({layout})", "layout": layout}
    return facts | {"problem": problem, "note": ""} | times


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], str]]:
    """Commands and classes of the processes, which answer at once that smaller classes take longer."""
    started = []

    def answer(command: list[str], *, env: dict[str, str], **_: object) -> subprocess.CompletedProcess:
        kib = env["EQACCEL_SHARED_KIB"]
        started.append((command, kib))
        rows = [_row(name, layout, 100 / int(kib)) for name in PROBLEMS for layout in ("ir_mul", "mul_ir")]
        Path(command[command.index("--json") + 1]).write_text(json.dumps({"rows": rows}))
        return subprocess.CompletedProcess(command, 0, "")

    monkeypatch.setattr(subprocess, "run", answer)
    return started


def _bench(*arguments: object) -> None:
    from eqaccel.benchmarks.command import main

    assert main(["machines", *map(str, arguments)]) == 0


@pytest.fixture
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from eqaccel.benchmarks import report

    found = {"device": "a GPU", "gpu": True, "versions": {}, "commit": None, "date": "2020-01-01", "threads": 1}
    empty = {"benchmark": "machines", "environment": found, "dtype": "float32"}
    monkeypatch.setattr(report, "new_results", lambda *_: empty | {"rows": []})


@pytest.mark.usefixtures("_no_device")
def test_each_class_has_a_process_a_column_and_a_colour(tmp_path, processes, capsys):
    pytest.importorskip("matplotlib")
    from eqaccel.benchmarks.command import BENCHMARKS

    file, picture = tmp_path / "all.json", tmp_path / "all.png"
    _bench("--device", "cuda", "--problems", "mace-large", "--json", file, "--plot", picture)
    assert [kib for _, kib in processes] == list(map(str, CLASSES))
    parser = argparse.ArgumentParser()
    BENCHMARKS["kernels"].add_arguments(parser)
    for command, _ in processes:
        start = command.index("bench") + 1
        asked = parser.parse_args(command[start + 1 :])
        assert (command[start], asked.problems, asked.compare) == ("kernels", ["mace-large"], ["none"])
    rows = json.loads(file.read_text())["rows"]
    assert {row["shared_kib"] for row in rows} == set(CLASSES)
    assert {row["layout"] for row in rows} == {"ir_mul"}
    # Its double backward kernel takes 112 KiB, so that two classes have one of their own.
    planned = {row["shared_kib"]: row["planned_kib"] for row in rows if row["problem"] == "mace-large"}
    assert {kib: found["double_backward"] for kib, found in planned.items()} == {227: 227, 163: 227, 99: 99, 64: 64}
    assert all(found["forward"] == 227 for found in planned.values())
    table = capsys.readouterr().out
    assert all(f"{kib} KiB, ms" in table for kib in CLASSES)
    assert f"{100 / 99:.3f}, {227 / 99:.2f}x *" in table
    assert picture.stat().st_size > 10_000


@pytest.mark.usefixtures("_no_device")
def test_pieces_of_classes_join(tmp_path, processes, capsys):
    from eqaccel.benchmarks.report import load

    files = []
    for size in ("227", "99,64"):
        files.append(tmp_path / f"{size}.json")
        _bench("--device", "cuda", "--shared-kib", size, "--json", files[-1])
    assert {row["shared_kib"] for row in load(files)["rows"]} == {227, 99, 64}


def test_what_cannot_be_run_is_refused(capsys):
    from eqaccel.benchmarks.command import main

    with pytest.raises(SystemExit, match="expected --device cuda and a GPU, got a CPU"):
        main(["machines", "--device", "cpu"])
    with pytest.raises(SystemExit):
        main(["machines", "--shared-kib", "99,much"])
    assert "expected whole numbers from 1 to 1024" in capsys.readouterr().err


@pytest.mark.usefixtures("_no_device")
def test_a_process_that_fails_says_why(monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "no such device")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(RuntimeError, match="timing kernels for 227 KiB failed: no such device"):
        _bench("--device", "cuda")

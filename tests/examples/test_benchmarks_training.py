"""The benchmark of training: what it counts, what it refuses, what it writes."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytest.importorskip("ase", reason="the structures are ASE's")
if find_spec("scipy") is None:
    pytest.skip("the graphs of the benchmarks need scipy", allow_module_level=True)

from patch_checks import RELATIVE

from eqaccel.benchmarks import training, training_tables
from eqaccel.benchmarks.command import main
from eqaccel.benchmarks.timing import allocated_peak

COMMON = ["training", "--device", "cpu", "--threads", "1", "--dtype", "float64", "--repetitions", "2"]
SMALL = ["--models", "alloy", "--systems", "alloy-4", "--structures", "2", "--channels", "4"]


@pytest.fixture(autouse=True)
def _threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def results(folder: Path, *options: str) -> dict:
    """Runs `python -m eqaccel bench training` on the CPU; returns what it wrote."""
    assert main([*COMMON, "--json", str(folder / "result.json"), *options]) == 0
    return json.loads((folder / "result.json").read_text())


def test_operators_that_compute_are_counted() -> None:
    x = torch.ones(6, requires_grad=True)
    with training._Operators() as operators:
        (2 * x.view(2, 3)).sum().backward()  # two, the gradient that it starts with, and its product
    assert operators.calls == 4


def test_the_peak_of_memory_is_that_of_what_is_there_at_once() -> None:
    def call() -> None:
        for _ in range(3):
            torch.ones(1000)
        kept = torch.ones(2000)
        torch.ones(500)
        del kept

    assert allocated_peak(call) == 4 * 2500


def test_other_numbers_are_refused() -> None:
    right = (torch.tensor(2.0), {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])})
    peer = (torch.tensor(2.0), {"a": torch.tensor([[3.0], [0.03]]), "b": torch.zeros(5)})
    found = training._check(peer, right, 0.011)
    assert found["gradient_difference"] == pytest.approx(0.01)
    assert found["parameters_compared"] == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match=r"other numbers: loss difference 0\.0e\+00, gradient difference 1.0e-02"):
        training._check(peer, right, 0.009)


@pytest.mark.filterwarnings("ignore")
def test_mace_as_it_comes_and_patched(tmp_path: Path) -> None:
    pytest.importorskip("mace")
    pytest.importorskip("matplotlib")
    outputs = ["--markdown", str(tmp_path / "result.md"), "--plot", str(tmp_path / "result.png")]
    own, plain, peer = results(tmp_path, *SMALL, "--compare", "e3nn,oeq", *outputs)["rows"]
    assert (own["implementation"], plain["implementation"]) == ("eqaccel", "e3nn")
    for row in (own, plain):
        assert max(row["loss_difference"], row["gradient_difference"]) < RELATIVE
        assert row["parameters_compared"] == 1
        assert row["atoms"] == 8
        assert row["step"]["p90_ms"] >= row["step"]["median_ms"] > 0
    assert own["operators"] < plain["operators"]
    assert own["step"]["peak_bytes"] < plain["step"]["peak_bytes"]
    assert "step" not in peer
    assert peer["note"]
    assert f"alloy, alloy-4, 8/{own['edges']}" in (tmp_path / "result.md").read_text()
    assert (tmp_path / "result_memory.png").read_bytes().startswith(b"\x89PNG")


def test_the_limit_of_time_is_kept(tmp_path: Path) -> None:
    pytest.importorskip("mace")
    found = results(tmp_path, *SMALL, "--compare", "e3nn", "--time-limit", "0")
    assert [row["note"] for row in found["rows"]] == ["not begun within 0 s"] * 2
    assert training_tables.draw(found, tmp_path / "none.png") == []


def gpu_results() -> dict:
    """As of a run on a GPU."""
    case = {"model": "mp0-medium", "system": "carbon-64", "atoms": 512, "edges": 80000, "note": ""}
    rows = []
    for factor, name in ((1.0, "eqaccel"), (4.0, "e3nn"), (2.0, "cuEquivariance")):
        step = {"median_ms": 10 * factor, "p10_ms": 9 * factor, "p90_ms": 12 * factor, "peak_bytes": 10**9}
        counts = {"operators": 300, "launches": int(400 * factor), "device_ms": 8.0}
        numbers = {"loss_difference": 1e-7, "gradient_difference": 2e-7, "parameters_compared": 1 / factor}
        rows.append(case | {"implementation": name, "step": step} | counts | numbers)
    rows.append(case | {"implementation": "OpenEquivariance", "note": "out of memory"})
    return {"benchmark": "training", "environment": {"gpu": True, "device": "a GPU"}, "dtype": "float32", "rows": rows}


def test_tables_show_ratios_launches_and_lack_of_memory() -> None:
    found = gpu_results()
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in training_tables.format_table(found).split("\n")
    ]
    peer = next(line for line in lines if line[1:2] == ["cuEquivariance"])
    assert peer[0] == "mp0-medium, carbon-64, 512/80000"
    assert peer[2:] == ["20.00 (2.00x)", "18.00 to 24.00", "1000", "800", "8.00", "300", "1e-07, 2e-07 (of 50 %)", ""]
    short = training_tables.compact(found)
    assert "MACE mp0-medium, carbon, 512 atoms" in short
    assert "20.0 ms (2.00x)" in short
    assert "out of memory" in short

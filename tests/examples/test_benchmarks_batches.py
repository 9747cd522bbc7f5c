"""The benchmark of torch-sim's dynamics: what it times, and what it writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytest.importorskip("mace", reason="needs mace-torch")
pytest.importorskip("torch_sim", reason="needs torch-sim-atomistic")
if find_spec("scipy") is None:
    pytest.skip("the graphs of the benchmarks need scipy", allow_module_level=True)

from patch_checks import RELATIVE

from eqaccel.benchmarks import batches
from eqaccel.benchmarks.command import main

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_one_cell_and_two_as_it_comes_and_patched(tmp_path: Path) -> None:
    file, default = tmp_path / "result.json", torch.get_default_dtype()
    small = ["--elements", "6", "--channels", "4", "--systems", "carbon-8", "--cells", "1,2", "--dtype", "float64"]
    how = ["--device", "cpu", "--threads", "1", "--steps", "3", "--compare", "e3nn,cue"]
    assert main(["batches", *small, *how, "--json", str(file), "--markdown", str(tmp_path / "result.md")]) == 0
    assert torch.get_default_dtype() == default
    results = json.loads(file.read_text())
    for number, rows in enumerate((results["rows"][:3], results["rows"][3:]), start=1):
        own, plain, peer = rows
        assert [row["implementation"] for row in rows] == ["eqaccel", "e3nn", "cuEquivariance"]
        for row in (own, plain):
            assert row["system"] == f"carbon-8 x {number}"
            assert row["atoms"] == 8 * number
            assert row["step"]["repetitions"] == 3
            assert row["force_difference"] < RELATIVE
            assert row["atoms_per_s"] == pytest.approx(8e3 * number / row["step"]["mean_ms"])
        assert own["rebuilds"] >= 1
        assert own["calls"] == 7, "the first one, three to warm up, and three that are timed"
        assert own["anew"]["repetitions"] == 3
        assert "step" not in peer
        assert peer["note"]
    assert "mp0-medium, carbon-8 x 2" in (tmp_path / "result.md").read_text()
    assert batches.compact(results).count("ms") == 4
    pytest.importorskip("matplotlib")
    (picture,) = batches.draw(results, tmp_path / "result.png")
    assert picture.read_bytes().startswith(b"\x89PNG")

"""The benchmark of lower precision: what it makes of energies, and what it writes."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from folders import EXAMPLES

pytest.importorskip("ase", reason="the structures are ASE's")
if find_spec("scipy") is None:
    pytest.skip("the graphs of the benchmarks need scipy", allow_module_level=True)

from eqaccel.benchmarks import precision
from eqaccel.benchmarks.command import main


def test_a_drift_is_a_line_through_blocks() -> None:
    steps = np.arange(1000)
    line = precision.fit_drift(3.0 + 2e-6 * steps)  # meV an atom; a step is 1e-6 ns
    assert line["drift"] == pytest.approx(2.0)
    assert line["drift_error"] < 1e-6
    assert line["swing"] < 1e-9
    noise = np.random.default_rng(0).normal(size=1000)
    noisy = precision.fit_drift(2e-6 * steps + noise)
    # A slope over a time t of n numbers with noise of 1 is known to sqrt(12 / n) / t.
    expected = np.sqrt(12 / 1000) / 1e-3
    assert 0.3 * expected < noisy["drift_error"] < 3 * expected
    assert abs(noisy["drift"] - 2.0) < 4 * expected
    assert noisy["swing"] == pytest.approx(1.0, rel=0.1)


def test_errors_are_those_against_float64() -> None:
    exact = {
        "energies": np.array([1.0, 2.0]),
        "forces": np.array([[3.0, 0.0, 4.0]]),
        "frequencies": np.array([4.0, 5.0]),
    }
    found = {
        "energies": np.array([1.0, 2.5]),
        "forces": np.array([[3.0, 0.5, 4.0]]),
        "frequencies": np.array([4.0, 5.2]),
    }
    errors = precision._errors(found, exact)
    assert errors["force_error"] == pytest.approx(0.1)
    assert errors["largest_force_error"] == pytest.approx(0.5)
    assert errors["energy_error"] == pytest.approx(500.0)
    assert errors["phonons"] == pytest.approx({"largest": 0.2, "rms": 0.2 / np.sqrt(2), "highest": 5.0})
    assert "phonons" not in precision._errors(
        *({k: v for k, v in d.items() if k != "frequencies"} for d in (found, exact))
    )


@pytest.mark.filterwarnings("ignore")
def test_precisions_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("mace", reason="needs mace-torch")
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    options = ["--atoms", "4", "--steps", "20", "--subjects", "alloy", "--device", "cpu", "--threads", "1"]
    if find_spec("phonopy") is None:
        options.append("--skip-phonons")
    model = ["--alloy", str(EXAMPLES / "models" / "cuau_emt.model")]
    assert main(["precision", *options, *model, "--json", str(tmp_path / "found.json")]) == 0
    torch.set_num_threads(threads)
    assert torch.get_default_dtype() == dtype
    rows = {row["implementation"]: row for row in json.loads((tmp_path / "found.json").read_text())["rows"]}
    assert list(rows) == ["float64", "float32", "bfloat16 weights"]  # a CPU rounds no factors
    assert "force_error" not in rows["float64"]
    full, rounded = rows["float32"], rows["bfloat16 weights"]
    assert 0 < full["force_error"] < 1e-5
    unit = torch.finfo(torch.bfloat16).eps / 2
    assert 1e-2 * unit < rounded["force_error"] < 4 * unit
    if "phonons" in full:
        assert full["phonons"]["largest"] < 0.1 * rounded["phonons"]["largest"]
        assert 1 < full["phonons"]["highest"] < 20
    assert "± " in capsys.readouterr().out

"""The example for OpenMM trains, simulates the same plain and accelerated, and writes down what it promises."""

from __future__ import annotations

import json
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from folders import EXAMPLES

pytest.importorskip("mace")
pytest.importorskip("matplotlib")
pytest.importorskip("openmmml", reason="needs openmm and openmmml")

pytestmark = pytest.mark.filterwarnings("ignore")

SINGLE = float(torch.finfo(torch.float32).eps)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The example as a module."""
    monkeypatch.syspath_prepend(EXAMPLES)
    import openmm_mlmm

    return openmm_mlmm


def test_a_molecule_in_water(tmp_path: Path, example: types.ModuleType) -> None:
    tiny = ["--configurations", "20", "--epochs", "1", "--channels", "8", "--waters", "60", "--dtype", "float64"]
    results = example.main([*tiny, "--steps", "4", "--reference-steps", "2", "--device", "cpu", "--out", str(tmp_path)])
    # OpenMM-ML has 96.4853 kJ/mol for an electronvolt, ASE has all digits: 4e-7 of a force, none of which is as large
    # as 100 eV/A. The CPU platform has single precision.
    assert results["max_force_difference"] < 100 * (4e-7 + SINGLE)
    before, after = results["runs"]
    assert (before["label"], after["label"]) == ("unpatched", "patched")
    assert (len(before["step_ms"]), len(after["step_ms"])) == (2, 4)
    # In meV an atom: what OpenMM's CPU platform adds up in single precision. The largest terms are those of the charges
    # of a water, 0.83 and 0.42 at 0.96 A from each other: 5.2 eV, twice in three atoms; with all others, 8 eV an atom.
    np.testing.assert_allclose(after["energies"][:3], before["energies"], rtol=0, atol=1e3 * 8 * SINGLE)
    assert json.loads((tmp_path / "results.json").read_text()) == results
    assert (tmp_path / "mlmm.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "alanine_dipeptide.model").is_file()


@pytest.mark.parametrize("options", [("--steps", "0"), ("--waters", "10")])
def test_options_that_make_no_sense(options: tuple[str, str], example: types.ModuleType) -> None:
    with pytest.raises(SystemExit):
        example.parse_arguments(list(options))

"""The NequIP example writes what it promises, its dynamics are bounded, and it runs models from files too."""

from __future__ import annotations

import json
import types
from pathlib import Path

import ase.io
import numpy as np
import pytest
from folders import EXAMPLES

pytest.importorskip("nequip", reason="needs nequip")
pytest.importorskip("matplotlib")

import nequip_models as nm
from patch_checks import RELATIVE

TINY = ("--preset", "S", "--device", "cpu", "--dtype", "float64", "--interval", "2")

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("nequip_defaults")]


@pytest.fixture
def md_nequip(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    import md_nequip

    return md_nequip


@pytest.mark.slow
def test_water_box(md_nequip: types.ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    md_nequip.main([*TINY, "--atoms", "24", "--steps", "20", "--reference-steps", "4", "--out", str(tmp_path)])
    results = json.loads((tmp_path / "results.json").read_text())
    text = capsys.readouterr().out
    assert "layer1_convnet.conv.tp_scatter" in text
    assert "ms per step" in text
    assert results["atoms"] == 24
    assert results["max_force_difference"] < 100 * RELATIVE  # eV/A: no force is as large as 100
    before, after = results["runs"]
    assert np.abs(after["energies"]).max() < 1, "meV per atom: the run does not conserve energy"
    # In meV an atom, and above the first: of two energies, whose terms are less than 100 eV an atom.
    np.testing.assert_allclose(after["energies"][:5], before["energies"], rtol=0, atol=1e3 * 2 * 100 * RELATIVE)
    assert len(ase.io.read(tmp_path / "patched.traj", index=":")) == 11
    assert (tmp_path / "md.png").read_bytes().startswith(b"\x89PNG")


def test_random_weights_give_forces_of_the_wanted_size(md_nequip: types.ModuleType) -> None:
    box = md_nequip.water_box(2, np.random.default_rng(0))
    model = md_nequip.random_model("S", "float64", 4.0, box)
    forces = md_nequip.calculator_of(model, "cpu").get_forces(box)
    assert np.linalg.norm(forces, axis=1).mean() == pytest.approx(md_nequip.MEAN_FORCE, rel=0.2)


@pytest.mark.slow
def test_model_and_structure_from_files(md_nequip: types.ModuleType, tmp_path: Path) -> None:
    model, structure = tmp_path / "model.nequip.zip", tmp_path / "start.xyz"
    nm.packaged(nm.model(), model)
    ase.io.write(structure, nm.structures()[0])
    files = ("--model", str(model), "--structure", str(structure))
    results = md_nequip.main([*TINY, *files, "--steps", "2", "--reference-steps", "2", "--out", str(tmp_path)])
    assert results["atoms"] == 8
    assert results["max_force_difference"] < 100 * RELATIVE

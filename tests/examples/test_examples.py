"""The examples run from the command line, write what they promise, and report believable numbers."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from folders import EXAMPLES
from patch_checks import RELATIVE

pytest.importorskip("mace")
pytest.importorskip("matplotlib")
ase_io = pytest.importorskip("ase.io")


def run_example(name: str, *arguments: object) -> str:
    """Runs an example as a user does and returns what it prints."""
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def md_mace(monkeypatch):
    """The example as a module, for the cases that need no process of their own."""
    monkeypatch.syspath_prepend(EXAMPLES)
    import md_mace

    return md_mace


@pytest.mark.slow
def test_md_mace_writes_its_results(tmp_path, md_mace, capsys):
    """CI runs it from the command line."""
    tiny = ["--atoms", "32", "--steps", "5", "--reference-steps", "2", "--interval", "2", "--dtype", "float64"]
    md_mace.main([*tiny, "--device", "cpu", "--out", str(tmp_path)])
    text = capsys.readouterr().out
    results = json.loads((tmp_path / "results.json").read_text())

    assert "interactions.0.conv_tp" in text
    assert "ms per step" in text
    assert results["atoms"] == 32
    assert results["max_force_difference"] < 100 * RELATIVE  # eV/A: no force is as large as 100
    before, after = results["runs"]
    assert (before["label"], after["label"]) == ("unpatched", "patched")
    assert (len(before["step_ms"]), len(after["step_ms"])) == (2, 5)
    assert results["speedup"] == pytest.approx(before["ms_per_step"] / after["ms_per_step"])
    assert after["ns_per_day"] == pytest.approx(2e-6 * 86400e3 / after["ms_per_step"])
    assert np.abs(after["energies"]).max() < 20, "meV per atom: the run blew up"
    # Both runs start from the same frame, so the steps that they share agree.
    # In meV an atom, and above the first: of two energies, whose terms are less than 100 eV an atom.
    np.testing.assert_allclose(after["energies"][:3], before["energies"], rtol=0, atol=1e3 * 2 * 100 * RELATIVE)

    frames = ase_io.read(tmp_path / "patched.traj", index=":")
    assert len(frames) == 4  # the start, steps 2 and 4, and the last
    assert np.isfinite(frames[-1].get_forces()).all()
    assert (tmp_path / "md.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_md_mace_takes_a_structure_and_a_thermostat(tmp_path, md_mace):
    structure = tmp_path / "start.xyz"
    atoms = md_mace.alloy(1, gold=0.5, strain=np.zeros((3, 3)), rng=np.random.default_rng(0))
    ase_io.write(structure, atoms)
    tiny = ["--steps", "3", "--reference-steps", "3", "--device", "cpu", "--out", str(tmp_path)]
    results = md_mace.main(["--structure", str(structure), "--ensemble", "langevin", *tiny])
    assert results["atoms"] == 4
    before, after = results["runs"]
    # In meV an atom, in float32. What is asserted is physics: both runs have the same forces and random numbers, and
    # differ by far less than k_B T, 26 meV; 0.05 is a five-hundredth of it.
    np.testing.assert_allclose(after["energies"], before["energies"], rtol=0, atol=0.05)


def test_md_mace_names_a_missing_model_file(md_mace):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.model"):
        md_mace.load_calculator("nowhere.model", "cpu", "float32")


@pytest.mark.slow
def test_train_alloy_saves_a_model_that_mace_reads(tmp_path):
    from ase.build import bulk
    from mace.calculators import MACECalculator

    text = run_example("train_alloy.py", "--smoke", "--out", tmp_path, "--name", "tiny")
    assert "forces (meV/A)" in text
    calculator = MACECalculator(model_paths=str(tmp_path / "tiny.model"), device="cpu", default_dtype="float32")
    assert calculator.z_table.zs == [29, 79]
    atoms = bulk("Au", "fcc", a=4.08)
    atoms.calc = calculator
    assert np.isfinite(atoms.get_stress()).all()


@pytest.fixture
def finetune_mace(monkeypatch):
    """The example as a module; what it sets for the process is set back."""
    import torch

    monkeypatch.syspath_prepend(EXAMPLES)
    import finetune_mace

    threads = torch.get_num_threads()
    yield finetune_mace
    torch.set_num_threads(threads)


def test_fine_tuning_agrees_plain_and_patched(tmp_path, finetune_mace):
    import torch

    results = finetune_mace.main(["--configurations", "6", "--epochs", "1", "--device", "cpu", "--out", str(tmp_path)])
    assert results["max_loss_difference"] <= results["loss_tolerance"] < 1e-9
    before, after = results["runs"]
    assert (before["label"], after["label"]) == ("unpatched", "patched")
    assert len(before["losses"]) == len(after["losses"]) == 2
    assert before["errors_before"] == pytest.approx(after["errors_before"])
    assert before["errors_after"] == pytest.approx(after["errors_after"])
    assert before["errors_after"] != before["errors_before"]
    assert 0 < after["peak_mb"] < before["peak_mb"]
    assert json.loads((tmp_path / "results.json").read_text()) == results
    assert (tmp_path / "finetune.png").read_bytes().startswith(b"\x89PNG")
    saved = torch.load(tmp_path / "finetuned.model", weights_only=False)
    assert type(saved.interactions[0].conv_tp).__module__.startswith("e3nn")


def test_fine_tuning_needs_two_steps(finetune_mace, capsys):
    with pytest.raises(SystemExit):
        finetune_mace.parse_arguments(["--configurations", "4", "--epochs", "1"])
    assert "expected two steps at least" in capsys.readouterr().err


@pytest.mark.parametrize("difference", [1.1e-9, float("nan")])
def test_losses_that_differ_are_an_error(finetune_mace, difference):
    finetune_mace.require_agreement(1e-9, 1e-9)
    with pytest.raises(RuntimeError, match=r"more than rounding explains: 1\.0e-09"):
        finetune_mace.require_agreement(difference, 1e-9)

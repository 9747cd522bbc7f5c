"""docs/nequip.md: every line of code in it runs as it stands, with a small package as `model.nequip.zip`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

pytest.importorskip("nequip", reason="needs nequip")

import nequip_models as nm
from ase import Atoms
from documents import inline_codes, python_blocks, run_command
from nequip.model import modify
from patch_checks import RELATIVE, assert_close

import eqaccel

pytestmark = pytest.mark.filterwarnings("ignore")

PAGE = "docs/nequip.md"
PATCHED = ["eqaccel.patch(model)", "print(eqaccel.report(model))", "eqaccel.unpatch(model)"]
COMPILE = "nequip-compile ... --modifiers enable_eqaccel"  # run by test_nequip_extension.py
MODIFIERS = "modifiers: [{modifier: enable_eqaccel}]"
EXPORT = "python -m eqaccel export model.nequip.zip my.pt"
WRAPPER = "eqaccel.patch(NequIPTorchSimCalc(...))"
OPENMM = 'MLPotential("ase").createSystem(topology, calculator=eqaccel.Calculator("model.nequip.zip"))'


@pytest.fixture(autouse=True)
def _in_a_folder_with_the_model(nequip_defaults: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nm.packaged(nm.model(), tmp_path / "model.nequip.zip")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def atoms() -> Atoms:
    return nm.structures()[0]


@pytest.fixture
def forces() -> np.ndarray:
    """Of NequIP's own model."""
    return nm.model()(nm.data(nm.structures()[:1]))["forces"].detach().numpy()


def assert_same(found: np.ndarray, forces: np.ndarray) -> None:
    assert np.abs(found - forces).max() <= RELATIVE * np.abs(forces).max()


def test_every_line_has_a_test() -> None:
    assert inline_codes(PAGE) == [*PATCHED, COMPILE, MODIFIERS, EXPORT, "pair_style eqaccel", WRAPPER, OPENMM]
    assert len(python_blocks(PAGE)) == 1


def test_the_calculator(atoms: Atoms, forces: np.ndarray) -> None:
    exec(python_blocks(PAGE)[0], {"atoms": atoms})
    assert_same(atoms.get_forces(), forces)


def test_a_model_in_place(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"eqaccel": eqaccel, "model": nm.model()}
    plain = names["model"](nm.data())["forces"]
    exec(PATCHED[0], names)
    assert nm.replaced_layers(names["model"]) == 3
    assert_close(names["model"](nm.data())["forces"], plain)
    exec(PATCHED[1], names)
    assert "modules accelerated" in capsys.readouterr().out
    exec(PATCHED[2], names)
    assert nm.replaced_layers(names["model"]) == 0


def test_the_modifier_of_a_training_config() -> None:
    model = modify(nm.model(), yaml.safe_load(MODIFIERS)["modifiers"])
    assert nm.replaced_layers(model) == 3


@pytest.mark.slow
def test_lammps(atoms: Atoms, forces: np.ndarray, tmp_path: Path) -> None:
    lammps_runs = pytest.importorskip("lammps_runs")
    run_command(EXPORT)
    atoms.cell, rotation = atoms.cell.standard_form()  # as LAMMPS wants it
    atoms.positions = atoms.positions @ rotation.T
    elements = nm.ELEMENTS
    lammps_runs.write_data(tmp_path / "start.data", atoms, elements)
    (frame,) = lammps_runs.simulate(tmp_path, "run 0", style="eqaccel", coeff=f"* * my.pt {' '.join(elements)}")
    assert np.abs(frame.forces - forces @ rotation.T).max() <= lammps_runs.RTOL * np.abs(forces).max()


def test_torch_sim(atoms: Atoms, forces: np.ndarray) -> None:
    ts = pytest.importorskip("torch_sim", reason="needs torch-sim-atomistic")
    from nequip.integrations.torchsim import NequIPTorchSimCalc

    names = {"eqaccel": eqaccel, "NequIPTorchSimCalc": NequIPTorchSimCalc, "model": nm.model(), "nm": nm}
    arguments = 'model, torch.device("cpu"), transforms=transforms'
    names |= {"torch": torch, "transforms": nm.transforms()}
    wrapper = eval(WRAPPER.replace("...", arguments), names)
    found = wrapper(ts.io.atoms_to_state([atoms], torch.device("cpu"), torch.float64))
    assert_same(found["forces"].numpy(), forces)
    assert eqaccel.report(wrapper).accelerated > 0


def test_openmm(atoms: Atoms, forces: np.ndarray) -> None:
    """OpenMM-ML, which is tested with MACE, hands the atoms to the calculator."""

    class MLPotential:
        def __init__(self, name: str) -> None:
            assert name == "ase"

        def createSystem(self, topology: Atoms, calculator: Any) -> np.ndarray:  # noqa: N802
            return calculator.get_forces(topology)

    names = {"eqaccel": eqaccel, "MLPotential": MLPotential, "topology": atoms}
    assert_same(eval(OPENMM, names), forces)

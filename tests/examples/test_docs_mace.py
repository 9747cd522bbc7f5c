"""docs/mace.md: every line of code in it runs as it stands, with the example's model as `my.model`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("mace", reason="needs mace-torch")

from ase import Atoms, units
from ase.build import bulk
from documents import inline_codes, python_blocks, run_command
from folders import EXAMPLES
from mace.calculators import MACECalculator
from patch_checks import RELATIVE

import eqaccel
from eqaccel.__main__ import main

pytestmark = pytest.mark.filterwarnings("ignore")

PAGE = "docs/mace.md"
EXPORT = "python -m eqaccel export my.model my.pt"
OPENMM = 'MLPotential("ase").createSystem(topology, calculator=eqaccel.Calculator("my.model"))'
WRAPPER = "eqaccel.patch(MaceModel(model, device=device, dtype=dtype))"


@pytest.fixture(autouse=True)
def _in_a_folder_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(EXAMPLES / "models" / "cuau_emt.model", tmp_path / "my.model")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def atoms() -> Atoms:
    atoms = bulk("Cu", cubic=True).repeat((2, 1, 1))
    atoms.symbols[::3] = "Au"
    atoms.rattle(0.1, seed=0)
    return atoms


@pytest.fixture
def forces(atoms: Atoms) -> np.ndarray:
    """Of MACE's own calculator."""
    return MACECalculator(model_paths="my.model", device="cpu").get_forces(atoms)


def assert_same(found: np.ndarray, forces: np.ndarray) -> None:
    assert np.abs(found - forces).max() <= RELATIVE * np.abs(forces).max()


def test_every_line_has_a_test() -> None:
    patched = ["print(eqaccel.report(calculator))", "eqaccel.unpatch(calculator)"]
    table = ['eqaccel.Calculator("my.model")', "eqaccel mace_run_train", EXPORT, "pair_style eqaccel", WRAPPER, OPENMM]
    assert inline_codes(PAGE) == patched + table
    assert len(python_blocks(PAGE)) == 1


def test_the_calculator(atoms: Atoms, forces: np.ndarray, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(python_blocks(PAGE)[0], names)
    calculator = names["calculator"]
    assert type(calculator).__mro__[1] is MACECalculator
    assert_same(calculator.get_forces(atoms), forces)
    exec("print(eqaccel.report(calculator))", names)
    assert "modules accelerated" in capsys.readouterr().out
    exec("eqaccel.unpatch(calculator)", names)
    assert type(calculator) is MACECalculator


def test_without_the_librarys_calculator(atoms: Atoms, forces: np.ndarray) -> None:
    assert_same(eval('eqaccel.Calculator("my.model")', {"eqaccel": eqaccel}).get_forces(atoms), forces)


def test_training(capsys: pytest.CaptureFixture[str]) -> None:
    """The program is MACE's, with its options; what it trains is tested with the integrations."""
    with pytest.raises(SystemExit) as done:
        main(["mace_run_train", "--help"])
    assert done.value.code == 0
    assert "--hidden_irreps" in capsys.readouterr().out


@pytest.mark.slow
def test_lammps(atoms: Atoms, forces: np.ndarray, tmp_path: Path) -> None:
    lammps_runs = pytest.importorskip("lammps_runs")
    run_command(EXPORT)
    lammps_runs.write_data(tmp_path / "start.data", atoms, ["Au", "Cu"])
    (frame,) = lammps_runs.simulate(tmp_path, "run 0", style="eqaccel", coeff="* * my.pt Au Cu")
    assert np.abs(frame.forces - forces).max() <= lammps_runs.RTOL * np.abs(forces).max()


def test_torch_sim(atoms: Atoms, forces: np.ndarray) -> None:
    ts = pytest.importorskip("torch_sim", reason="needs torch-sim-atomistic")
    from torch_sim.models.mace import MaceModel

    device, dtype = torch.device("cpu"), torch.float64
    model = torch.load("my.model", map_location=device, weights_only=False).to(dtype)
    wrapper = eval(WRAPPER, {"eqaccel": eqaccel, "MaceModel": MaceModel} | locals())
    found = wrapper(ts.io.atoms_to_state([atoms], device, dtype))
    assert_same(found["forces"].numpy(), forces)
    assert eqaccel.report(wrapper).accelerated > 0


def test_openmm(atoms: Atoms, forces: np.ndarray) -> None:
    pytest.importorskip("openmmml", reason="needs openmm and openmmml")
    import openmm
    from openmm import app, unit
    from openmmml import MLPotential

    topology = app.Topology()
    residue = topology.addResidue("cell", topology.addChain())
    for symbol in atoms.symbols:
        topology.addAtom(symbol, app.Element.getBySymbol(symbol), residue)
    topology.setPeriodicBoxVectors(atoms.cell.array * unit.angstrom)
    system = eval(OPENMM, {"eqaccel": eqaccel, "MLPotential": MLPotential} | locals())
    platform = openmm.Platform.getPlatformByName("Reference")
    context = openmm.Context(system, openmm.VerletIntegrator(0.001), platform)
    context.setPositions(atoms.positions * unit.angstrom)
    found = context.getState(forces=True).getForces(asNumpy=True)
    electronvolts = found.value_in_unit(unit.kilojoule_per_mole / unit.angstrom) * units.kJ / units.mol
    assert_same(electronvolts, forces)

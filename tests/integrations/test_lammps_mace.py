"""Exported MACE models in LAMMPS beside the unpatched model in ASE, and beside themselves on other numbers of ranks."""

from __future__ import annotations

import copy
import json
import subprocess
import sys

import numpy as np
import pytest
from folders import EXAMPLES

pytest.importorskip("mace", reason="needs mace-torch")

import mace_models as mm
import torch
from ase import Atoms
from ase.build import bulk
from ase.md.velocitydistribution import thermalize_momenta
from lammps_runs import BAR, BOXES, RTOL, RTOL_RUN, RTOL_SINGLE, frame_of, simulate, write_data
from mace.calculators import MACECalculator

import eqaccel

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
SHIPPED = EXAMPLES / "models/cuau_emt.model"
KINDS = {
    "three layers": {"num_interactions": 3, "pair_repulsion": True, "distance_transform": "Agnesi"},
    "density residual": {"interaction": "RealAgnosticDensityResidualInteractionBlock"},
    "non-linear": {
        "interaction": "RealAgnosticResidualNonLinearInteractionBlock",
        "use_agnostic_product": True,
        "apply_cutoff": False,
    },
}


def alloy(kind: str) -> Atoms:
    """Copper-gold: a crystal, sheared or not, or a slab two cells thick that leaves most of its box empty."""
    rng = np.random.default_rng(0)
    atoms = bulk("Cu", "fcc", a=3.8, cubic=True).repeat((3, 2, 2))
    atoms.symbols[rng.permutation(len(atoms))[::4]] = "Au"
    if kind == "sheared":
        atoms.set_cell(atoms.cell.array + np.array([[0, 0, 0], [1.0, 0, 0], [0.5, -0.7, 0]]), scale_atoms=True)
    if kind == "slab":
        atoms.pbc = (True, True, False)
        atoms.positions[:, 2] += 12
        atoms.cell[2, 2] = 48
    atoms.rattle(0.08, rng=rng)
    thermalize_momenta(atoms, temperature_K=600, rng=rng)
    return atoms


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The shipped model, as a file for each dtype. What is compared here needs no verification."""
    folder = tmp_path_factory.mktemp("exported")
    for dtype in ("float64", "float32"):
        model = torch.load(SHIPPED, map_location="cpu", weights_only=False).to(getattr(torch, dtype))
        eqaccel.export(eqaccel.patch(model, verify=False), folder / f"{dtype}.pt", verify=False)
    return folder


def assert_equals_ase(frame, atoms: Atoms, calculator: MACECalculator, eps: float = RTOL_RUN) -> None:
    """Energy and forces to eps, stress to a hundred times that, relative to the largest."""
    atoms.calc = calculator
    energy, forces = atoms.get_potential_energy(), atoms.get_forces()
    assert frame.thermo["PotEng"] == pytest.approx(energy, rel=eps)
    np.testing.assert_allclose(frame.energies, atoms.get_potential_energies(), rtol=0, atol=eps * abs(energy))
    np.testing.assert_allclose(frame.forces, forces, rtol=0, atol=eps * np.abs(forces).max())
    if atoms.pbc.all():
        stress = atoms.get_stress(voigt=False)[[0, 1, 2, 0, 0, 1], [0, 1, 2, 1, 2, 2]] * atoms.get_volume()
        np.testing.assert_allclose(-frame.virial / BAR, stress, rtol=0, atol=100 * eps * np.abs(stress).max())


def style_on(device: torch.device) -> str:
    """The files are for the CPU, and move."""
    return f"eqaccel device {device.type}"


def boundary(atoms: Atoms) -> str:
    return " ".join("p" if periodic else "f" for periodic in atoms.pbc)


@pytest.mark.parametrize(("kind", "ranks"), [("cubic", 1), ("sheared", 2), ("slab", 1), ("slab", 2)])
def test_shipped_model_equals_ase(kind, ranks, device, exported, tmp_path):
    atoms = alloy(kind)
    write_data(tmp_path / "start.data", atoms, ["Au", "Cu"])
    model = f"* * {exported}/float64.pt Au Cu"
    (frame,) = simulate(tmp_path, "run 0", ranks, boundary=boundary(atoms), coeff=model, style=style_on(device))
    assert_equals_ase(frame, atoms, MACECalculator(str(SHIPPED), device=device.type, default_dtype="float64"))


def test_shipped_model_in_float32(device, exported, tmp_path):
    atoms = alloy("sheared")
    write_data(tmp_path / "start.data", atoms, ["Au", "Cu"])
    for ranks in (1, 2):
        coeff = f"* * {exported}/float32.pt Au Cu"
        (frame,) = simulate(tmp_path, "run 0", ranks, coeff=coeff, style=style_on(device))
        calculator = MACECalculator(str(SHIPPED), device=device.type, default_dtype="float32")
        assert_equals_ase(frame, atoms, calculator, eps=RTOL_SINGLE)


@pytest.mark.parametrize(("kind", "grids"), [("sheared", ["1 2 2"]), ("slab", ["1 1 4"])])
def test_any_number_of_ranks_gives_the_same_run(kind, grids, device, exported, tmp_path):
    """Of the four ranks along the axis of the slab two have no atoms. On a GPU, the ranks share it."""
    atoms = alloy(kind)
    write_data(tmp_path / "start.data", atoms, ["Au", "Cu"], velocities=True)
    commands = "fix nve all nve\ntimestep 0.001\nrun 12"
    options = {"boundary": boundary(atoms), "coeff": f"* * {exported}/float64.pt Au Cu", "every": 12}
    options["style"] = style_on(device)
    expected = simulate(tmp_path, commands, **options)
    assert [frame.step for frame in expected] == [0, 12]
    for grid in grids:
        ranks = int(np.prod([int(number) for number in grid.split()]))
        frames = simulate(tmp_path, commands, ranks, processors=grid, **options)
        for frame, alone in zip(frames, expected, strict=True):
            np.testing.assert_allclose(frame.forces, alone.forces, rtol=0, atol=2 * RTOL)  # both runs round


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("change", ["none", "compression", "deposit"])
def test_lists_on_the_device_give_the_same_run(change, ranks, device, exported, tmp_path):
    """On a GPU steps are recorded, and recorded again when edges or atoms do not fit any more."""
    atoms = alloy("sheared" if change == "compression" else "slab")
    write_data(tmp_path / "start.data", atoms, ["Au", "Cu"], velocities=True)
    fixes = {
        "none": "",
        "compression": "fix d all deform 1 x scale 0.94 y scale 0.94 z scale 0.94 remap x\n",
        "deposit": "region top block 1 9 1 6 22 24\nfix d all deposit 2 1 12 4711 region top near 1.5\n",
    }
    commands = f"{fixes[change]}fix n all nve\ntimestep 0.001\nrun 30"
    options = {"boundary": boundary(atoms), "coeff": f"* * {exported}/float64.pt Au Cu", "every": 10, "stresses": False}
    frames = {
        lists: simulate(tmp_path, commands, ranks, style=f"{style_on(device)} lists {lists}", **options)
        for lists in ("host", "device")
    }
    log = (tmp_path / "log.lammps").read_text()
    assert f"lists stay on {device.type}" in log
    assert "eqaccel: 31 steps on kept lists" in log
    if device.type == "cuda" and ranks == 1:
        assert "recorded as a CUDA graph" in log
        reasons = {"none": "the first step", "compression": "more edges", "deposit": "another number of atoms"}
        assert f"for {reasons[change]}" in log
    for frame, host in zip(frames["device"], frames["host"], strict=True):
        scale = np.abs(host.forces).max()
        np.testing.assert_allclose(frame.forces, host.forces, rtol=0, atol=10 * RTOL_RUN * scale)
        np.testing.assert_allclose(frame.energies, host.energies, rtol=RTOL_RUN)
        np.testing.assert_allclose(frame.virial, host.virial, rtol=0, atol=10 * RTOL_RUN * np.abs(host.virial).max())


@pytest.fixture(scope="module", params=KINDS)
def plain_and_exported(request, tmp_path_factory):
    """A model as it was built, and its file."""
    model = mm.energy_model(**KINDS[request.param])
    file = tmp_path_factory.mktemp("kind") / "model.pt"
    eqaccel.export(eqaccel.patch(copy.deepcopy(model), verify=False), file, verify=False)
    return model, file


@pytest.mark.parametrize(("box", "ranks"), [("triclinic", 1), ("slab", 2), ("smaller than the cutoff", 2)])
def test_other_kinds_of_models_equal_ase(box, ranks, plain_and_exported, tmp_path):
    (model, file), elements = plain_and_exported, ["H", "C", "O"]
    atoms = frame_of(box, elements)
    write_data(tmp_path / "start.data", atoms, elements)
    options = {"boundary": BOXES[box][0], "coeff": f"* * {file} H C O"}
    (frame,) = simulate(tmp_path, "run 0", ranks, **options)
    with mm.default_dtype(torch.float64):
        assert_equals_ase(frame, atoms, MACECalculator(models=[model], device="cpu", default_dtype="float64"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_atoms_without_neighbours(ranks, device, exported, tmp_path):
    atoms = Atoms("CuAu", [[5, 5, 5], [25, 25, 25]], cell=[30, 30, 30])
    write_data(tmp_path / "start.data", atoms, ["Au", "Cu"])
    options = {"boundary": "f f f", "coeff": f"* * {exported}/float64.pt Au Cu", "style": style_on(device)}
    (frame,) = simulate(tmp_path, "run 0", ranks, **options)
    assert_equals_ase(frame, atoms, MACECalculator(str(SHIPPED), device=device.type, default_dtype="float64"))


def test_example_agrees_on_all_ranks_and_draws(tmp_path):
    pytest.importorskip("matplotlib")
    script = EXAMPLES / "lammps/run_nve.py"
    tiny = ["--cells", "2", "--steps", "12", "--ase-steps", "2", "--ranks", "1", "2", "--out", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, str(script), *tiny], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "LAMMPS, 2 ranks" in done.stdout
    results = json.loads((tmp_path / "out/results.json").read_text())
    one, two = results["runs"]
    assert max(two["force_difference"]) < 2 * RTOL  # eV/A, of forces of about one
    np.testing.assert_allclose(two["energies"], one["energies"], rtol=0, atol=1e-6)  # printed to 12 digits
    assert np.ptp(one["energies"]) < 5  # meV per atom
    assert (tmp_path / "out/nve.png").read_bytes().startswith(b"\x89PNG")

"""Programs that compute with ASE calculators get the same of a patched one: phonons, elasticity, paths, i-PI."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("mace", reason="needs mace-torch")

from ase import Atoms, units
from ase.build import bulk
from ase.io import write
from ase.mep import NEB
from folders import EXAMPLES, SUPPORT
from mace.calculators import MACECalculator

import eqaccel
from eqaccel.patches.rounding import FACTOR, ROUNDING

pytestmark = pytest.mark.filterwarnings("ignore")

MODEL = EXAMPLES / "models" / "cuau_emt.model"

BOUND = FACTOR * ROUNDING * np.finfo(float).eps
"""Rounding, relative to the sum of the absolute values that something is made of."""


@pytest.fixture
def plain(device: torch.device) -> MACECalculator:
    """MACE's calculator of the alloy that comes with the examples."""
    return calculator(device)


@pytest.fixture
def patched(plain: MACECalculator, device: torch.device) -> MACECalculator:
    """The same, without the verification of the model, which has tests of its own."""
    return eqaccel.patch(calculator(device), verify=False)


def calculator(device: torch.device) -> MACECalculator:
    return MACECalculator(model_paths=str(MODEL), device=str(device), default_dtype="float64")


def ordered_alloy() -> Atoms:
    """CuAu, layers of either element."""
    return Atoms("CuAu", scaled_positions=[[0, 0, 0], [0.5, 0.5, 0.5]], cell=[2.75, 2.75, 3.9], pbc=True)


def computed(calculator: Any, atoms: Atoms, name: str) -> np.ndarray:
    """One property of a structure, which stays as it is."""
    atoms = atoms.copy()
    atoms.calc = calculator
    return np.asarray(calculator.get_property(name, atoms))


def test_phonons(plain: Any, patched: Any) -> None:
    phonopy = pytest.importorskip("phonopy", reason="needs phonopy")
    from phonopy.structure.atoms import PhonopyAtoms

    atoms = ordered_alloy()
    cell = PhonopyAtoms(
        symbols=list(atoms.symbols), cell=atoms.cell.array, scaled_positions=atoms.get_scaled_positions()
    )
    # From near the centre, where bands begin at zero, to the faces, an edge and a corner of the zone.
    path = [np.linspace(0.05, 0.5, 6)[:, None] * end for end in ([1, 0, 0], [0, 0, 1], [1, 1, 0], [1, 1, 1])]
    bands = []
    for found in (plain, patched):
        phonons = phonopy.Phonopy(cell, supercell_matrix=np.diag([2, 2, 2]), log_level=0)
        phonons.generate_displacements(distance=0.01)
        supercells = (
            Atoms(list(s.symbols), scaled_positions=s.scaled_positions, cell=s.cell, pbc=True)
            for s in phonons.supercells_with_displacements
        )
        phonons.forces = [computed(found, supercell, "forces") for supercell in supercells]
        phonons.produce_force_constants()
        phonons.run_band_structure(path)
        bands.append(np.array(phonons.get_band_structure_dict()["frequencies"]))
    # Forces that differ by 1e-12 eV/A give force constants that differ by 1e-10 eV/A^2 (displacements of 0.01 A), of
    # some eV/A^2 at 10 THz. Frequencies are roots of these: the lowest, near 1 THz, are off by 1e-8 THz.
    assert np.abs(bands[0] - bands[1]).max() < 1e-6
    assert 1 < bands[0].max() < 20


def test_elastic_constants(plain: Any, patched: Any) -> None:
    atoms, strain = bulk("Au", "fcc", a=3.8, cubic=True), 1e-3
    atoms.symbols[:3] = "Cu"
    constants = []
    for found in (plain, patched):
        columns = []
        for i, j in ((0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1)):
            stresses = []
            for sign in (1, -1):
                deformation = np.eye(3)
                deformation[i, j] += sign * strain / 2
                deformation[j, i] += sign * strain / 2
                strained = atoms.copy()
                strained.set_cell(atoms.cell.array @ deformation, scale_atoms=True)
                stresses.append(computed(found, strained, "stress"))
            columns.append((stresses[0] - stresses[1]) / (2 * strain))
        constants.append(np.stack(columns, 1))
    # A stress is a sum over atoms and pairs, each at most of the size of the energy of cohesion in their volume.
    energy = np.abs(computed(plain, atoms, "energies")).sum() / atoms.get_volume()
    assert np.abs(constants[0] - constants[1]).max() <= BOUND * energy / strain
    c11, c12, c44 = (constants[1][k] / units.GPa for k in ((0, 0), (0, 1), (3, 3)))
    assert 300 > c11 > c12 > 0 < c44 < 200


def test_images_of_a_path_share_a_calculator(plain: Any, patched: Any) -> None:
    first = ordered_alloy() * (2, 2, 1)
    del first[0]
    last = first.copy()
    last.positions[1] = 0.5 * (last.positions[1] + first.cell.array.sum(0) / 4)
    forces = []
    for found in (plain, patched):
        images = [first.copy() for _ in range(4)] + [last.copy()]
        for image in images:
            image.calc = found
        path = NEB(images, allow_shared_calculator=True, method="improvedtangent", climb=True)
        path.interpolate(mic=True)
        forces.append(path.get_forces())
    assert np.abs(forces[0] - forces[1]).max() <= BOUND * np.abs(forces[0]).sum()
    assert np.abs(forces[0]).max() > 0.1


@pytest.mark.usefixtures("plain")
def test_ipi_with_two_beads(device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its driver for ASE against its driver for MACE; in this process, without a socket that could be waited for."""
    pytest.importorskip("ipi", reason="needs ipi")
    from ipi.scripting import InteractiveSimulation, motion_nvt_xml, simulation_xml

    monkeypatch.chdir(tmp_path)  # where i-PI writes
    beads = [ordered_alloy() * (2, 1, 1) for _ in range(2)]
    for number, bead in enumerate(beads):
        bead.rattle(0.05, seed=number)
    write("start.xyz", beads[0])
    motion, frames = motion_nvt_xml(timestep=1.0 * units.fs, path_integrals=True), []
    driver = f"custom</pes><pes_path>{SUPPORT / 'ipi_driver.py'}</pes_path>"
    for number, pes in enumerate(("mace</pes>", driver)):
        parameters = f"<parameters>{{template: start.xyz, model: {MODEL}, device: {device}}}</parameters>"
        field = f"<ffdirect name='forces'><pes>{pes}{parameters}</ffdirect>"
        text = simulation_xml(beads, field, motion, temperature=300, output=f"<output prefix='{number}'/>")
        same = text.replace("<system>", "<prng><seed>1</seed></prng><system>")
        simulation = InteractiveSimulation(same)
        simulation.run(4, write_outputs=False)
        frames.append(simulation.get_structures())
    assert len(frames[0]) == 2
    for start, one, other in zip(beads, *frames, strict=True):
        # Forces of rounding move atoms by less than themselves, in units of ASE, in these few femtoseconds.
        assert np.abs(one.positions - other.positions).max() <= BOUND * np.abs(one.get_forces()).sum()
        assert np.abs(one.positions - start.positions).max() > 1e-3

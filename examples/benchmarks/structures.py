"""The structures that whole models are timed on, and the springs that hold them together in a simulation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from eqaccel.benchmarks.graphs import water_box

if TYPE_CHECKING:  # the command line has to answer without it
    import ase

_LATTICE = {"C": 3.567, "Si": 5.431}  # of diamond, in angstrom
# eV/A^2: about as stiff as bonds hold atoms in solids and water
_SPRINGS = {"C": 36.0, "Si": 13.0, "H": 5.0, "O": 5.0, "Cu": 5.0, "Au": 5.0}
TEMPERATURE = 300.0  # kelvin


def diamond(atoms: int, element: str = "C", rattle: float = 0.02) -> ase.Atoms:
    """A cube of diamond of about so many atoms, jittered so that no force is zero."""
    from ase.build import bulk

    cells = max(1, round((atoms / 8) ** (1 / 3)))
    crystal = bulk(element, "diamond", a=_LATTICE[element], cubic=True) * (cells, cells, cells)
    crystal.rattle(rattle, seed=0)
    return crystal


def water(atoms: int) -> ase.Atoms:
    """A cube of water of about so many atoms; of 5184 it has the edges of the graph "water"."""
    from ase import Atoms

    cells = max(1, round((atoms / 3) ** (1 / 3)))
    positions, box, _ = water_box(cells, np.random.default_rng(0))
    return Atoms("OH2" * cells**3, positions, cell=[box] * 3, pbc=True)


def alloy(atoms: int) -> ase.Atoms:
    """A cube of Cu3Au of about so many atoms, a random solid solution."""
    from ase.build import bulk

    cells = max(1, round((atoms / 4) ** (1 / 3)))
    crystal = bulk("Cu", "fcc", a=3.73, cubic=True) * (cells, cells, cells)
    crystal.symbols[np.random.default_rng(0).permutation(len(crystal))[: len(crystal) // 4]] = "Au"
    crystal.rattle(0.01, seed=0)
    return crystal


SYSTEMS: dict[str, Callable[[int], ase.Atoms]] = {
    "carbon": partial(diamond, rattle=0.01),
    "silicon": partial(diamond, element="Si", rattle=0.01),
    "water": water,
    "alloy": alloy,
}
"""What is simulated, by the first part of its name."""


def read_system(name: str) -> tuple[str, int]:
    """What a system is made of and about how many atoms it has.

    Raises:
        ValueError: If there is none of that name.
    """
    kind, _, atoms = name.partition("-")
    if kind not in SYSTEMS or not atoms.isdecimal():
        choice = ", ".join(f"{known}-N" for known in SYSTEMS)
        raise ValueError(f"system: expected one of {choice} with a number N of atoms, got {name!r}")
    return kind, int(atoms)


def make_system(name: str) -> ase.Atoms:
    """A system with velocities, its atoms held by springs, which take half of the kinetic energy on average."""
    from ase.md.velocitydistribution import Stationary, thermalize_momenta

    kind, number = read_system(name)
    atoms = SYSTEMS[kind](number)
    thermalize_momenta(atoms, temperature_K=2 * TEMPERATURE, rng=np.random.default_rng(0))
    Stationary(atoms)
    atoms.set_constraint(Springs(atoms))
    return atoms


def make_sample(kind: str) -> ase.Atoms:
    """A small cell of a system, disturbed about as much as its atoms move."""
    atoms = SYSTEMS[kind](24 if kind == "water" else 8)
    atoms.rattle(0.05, seed=1)
    return atoms


class Springs:
    """An ASE constraint that holds atoms where they are now, as random weights do not.

    A spring to its site lets an atom swing about as far and as fast as in the real thing, so that lists of neighbours
    last as long as there.
    """

    def __init__(self, atoms: ase.Atoms) -> None:
        self._sites = atoms.get_positions()
        self._constants = np.array([self.constant(symbol) for symbol in atoms.symbols])[:, None]

    @staticmethod
    def constant(element: str) -> float:
        """Of the spring of an element, in eV/A^2."""
        return _SPRINGS[element]

    def adjust_forces(self, atoms: ase.Atoms, forces: np.ndarray) -> None:
        """Adds the forces of the springs."""
        forces -= self._constants * (atoms.positions - self._sites)

    def adjust_potential_energy(self, atoms: ase.Atoms) -> float:
        """The energy of the springs."""
        return float(0.5 * (self._constants * (atoms.positions - self._sites) ** 2).sum())

    def adjust_positions(self, atoms: ase.Atoms, positions: np.ndarray) -> None:
        """Leaves positions as they are."""

    def adjust_momenta(self, atoms: ase.Atoms, momenta: np.ndarray) -> None:
        """Leaves momenta as they are."""

    def get_removed_dof(self, atoms: ase.Atoms) -> int:
        """None."""
        return 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Springs:
        # ASE copies a structure, and with it what holds it, in every step.
        return self

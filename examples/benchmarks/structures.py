"""The structures that whole models are timed on."""

from __future__ import annotations

import ase.build
import numpy as np
from eqaccel.benchmarks.graphs import water_box


def diamond(atoms: int) -> ase.Atoms:
    """A cube of diamond of about so many atoms, jittered so that no force is zero."""
    cells = max(1, round((atoms / 8) ** (1 / 3)))
    crystal = ase.build.bulk("C", "diamond", a=3.567, cubic=True) * (cells, cells, cells)
    crystal.rattle(0.02, seed=0)
    return crystal


def water(atoms: int) -> ase.Atoms:
    """A cube of water of about so many atoms; of 5184 it has the edges of the graph "water"."""
    cells = max(1, round((atoms / 3) ** (1 / 3)))
    positions, box, _ = water_box(cells, np.random.default_rng(0))
    return ase.Atoms("OH2" * cells**3, positions, cell=[box] * 3, pbc=True)

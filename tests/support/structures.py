"""Structures that the tests of every family of models run on."""

from __future__ import annotations

import ase
import numpy as np


def crystal_and_molecule(rng: np.random.Generator) -> tuple[ase.Atoms, ase.Atoms]:
    """A sheared periodic crystal of three elements, and a molecule with an atom out of reach of the others."""
    grid = np.stack(np.meshgrid(*[np.arange(2)] * 3, indexing="ij"), -1).reshape(-1, 3) * 1.7
    crystal = ase.Atoms(
        numbers=[6, 8, 1, 6, 1, 8, 6, 1],
        positions=grid + rng.uniform(-0.2, 0.2, grid.shape),
        cell=[[3.4, 0.0, 0.0], [0.3, 3.4, 0.0], [0.0, -0.2, 3.5]],
        pbc=True,
    )
    return crystal, ase.Atoms("OHHC", [[0, 0, 0], [0.95, 0.1, 0], [-0.3, 0.9, 0.1], [0.2, 0.4, 8.0]])

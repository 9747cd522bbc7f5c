"""Neighbours of all atoms, computed in NumPy from every pair and every image."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray


def find_neighbors(
    positions: NDArray[np.float64], cell: NDArray[np.float64], cutoff: float, images: int = 0
) -> NDArray[np.float64]:
    """The edges of one structure, in the order (receiver, sender, shift).

    Args:
        positions: (num_atoms, 3).
        cell: (3, 3), a cell vector in each row.
        cutoff: Edges are shorter than that.
        images: Cells that are looked at in each direction; 0 where nothing is periodic.

    Returns:
        (num_edges, 8): receiver, sender, shift, and the vector from sender to receiver.
    """
    steps = range(-images, images + 1)
    shifts = np.array(list(itertools.product(steps, repeat=3)), dtype=np.float64)
    vectors = positions[:, None, None] - positions[None, :, None] - shifts @ cell
    near = (vectors**2).sum(axis=-1) < cutoff**2
    near[np.arange(len(positions)), np.arange(len(positions)), len(shifts) // 2] = False  # an atom and itself
    receiver, sender, shift = near.nonzero()
    return np.column_stack([receiver, sender, shifts[shift], vectors[near]])

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
    numbers = range(len(positions))
    shifts = [np.array(s) for s in itertools.product(range(-images, images + 1), repeat=3)]
    rows = []
    for receiver, sender in itertools.product(numbers, numbers):
        for shift in shifts:
            vector = positions[receiver] - positions[sender] - shift @ cell
            if (vector**2).sum() < cutoff**2 and (receiver != sender or shift.any()):
                rows.append([receiver, sender, *shift, *vector])
    return np.array(rows, dtype=np.float64).reshape(-1, 8)

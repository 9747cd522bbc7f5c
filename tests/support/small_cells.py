"""Edges between atoms in a cell that is smaller than the cutoff, in the order (receiver, sender, shift)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eqaccel.families.neighbors.reference import find_neighbors

CELL = np.array([[3.0, 0.0, 0.0], [0.4, 2.2, 0.0], [0.0, -0.3, 1.5]])
Edges = tuple[Tensor, Tensor, Tensor]  # receivers, senders, vectors


def edges_of(num_atoms: int, dtype: torch.dtype = torch.float64, cutoff: float = 1.7) -> Edges:
    """All edges of atoms; vectors of reverses are opposite in every bit."""
    positions = np.random.default_rng(num_atoms).uniform(-1.0, 3.0, (num_atoms, 3))
    rows = find_neighbors(positions, CELL, cutoff, images=5)
    receiver, sender = rows[:, 0].astype(int), rows[:, 1].astype(int)
    vectors = positions[receiver] - positions[sender] - rows[:, 2:5] @ CELL
    return torch.from_numpy(receiver), torch.from_numpy(sender), torch.from_numpy(vectors).to(dtype)


def chosen(edges: Edges, which: Tensor) -> Edges:
    """Some of the edges."""
    receiver, sender, vectors = edges
    return receiver[which], sender[which], vectors[which]


def received_by(atoms: Sequence[int], edges: Edges) -> Edges:
    """The edges that some atoms receive: all others are ghosts, which send alone."""
    return chosen(edges, torch.isin(edges[0], torch.tensor(list(atoms), dtype=torch.int64)))

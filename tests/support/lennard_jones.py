"""A potential and crystals that the tests of steps share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from eqaccel.step import Step, System

CUTOFF = 1.5


def lennard_jones(vectors: Tensor, edge_index: Tensor, types: Tensor, num_atoms: int, _: int) -> tuple[Tensor, Tensor]:
    """A potential that ends smoothly at the cutoff, of strengths that depend on both types."""
    with torch.enable_grad():
        leaf = vectors.detach().requires_grad_(True)
        square = leaf.square().sum(1) / CUTOFF**2
        strength = (1.0 + types[edge_index[0]]) * (1.0 + types[edge_index[1]])
        energy = strength * torch.where(square < 1, (1 - square) ** 3, torch.zeros_like(square))
        atoms = torch.arange(num_atoms, device=leaf.device)[:, None]  # index_add has no fixed order on a GPU
        nodes = torch.where(edge_index[1] == atoms, energy, torch.zeros_like(energy)).sum(1)
        (gradient,) = torch.autograd.grad(nodes.sum(), leaf)
    return nodes.detach().double(), gradient


def crystal(size: int = 3, seed: int = 0, periodic: tuple[bool, bool, bool] = (True, True, True)) -> System:
    rng = np.random.default_rng(seed)
    grid = np.stack(np.meshgrid(*[np.arange(size)] * 3, indexing="ij"), -1).reshape(-1, 3) * 0.9
    cell = 0.9 * size * np.eye(3) + rng.uniform(-0.1, 0.1, (3, 3))
    positions = grid + rng.uniform(-0.1, 0.1, grid.shape)
    return System(positions, cell[None], np.array([periodic]), rng.integers(0, 3, len(grid)), (len(grid),))


def new_step(device: torch.device, **options: object) -> Step:
    return Step([lennard_jones], CUTOFF, device, torch.float64, **{"skin": 0.3, **options})


def moved(system: System, by: np.ndarray | float) -> System:
    return replace(system, positions=system.positions + by)

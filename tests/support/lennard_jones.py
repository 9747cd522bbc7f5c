"""A potential and crystals that the tests of steps share, and what is right for them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from eqaccel.families.neighbors.reference import find_neighbors
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


def expected(system: System) -> tuple[float, np.ndarray]:
    """Energy and forces of `lennard_jones`, of every pair and image."""
    images = 4 if system.periodic.any() else 0
    rows = find_neighbors(system.positions, system.cells[0], CUTOFF, images)
    if not system.periodic.all():
        rows = rows[(rows[:, 2:5][:, ~system.periodic[0]] == 0).all(axis=1)]
    receiver, sender, v = rows[:, 0].astype(int), rows[:, 1].astype(int), rows[:, 5:]
    strength = (1.0 + system.types[receiver]) * (1.0 + system.types[sender])
    square = (v**2).sum(1) / CUTOFF**2
    gradient = (-6 * strength * (1 - square) ** 2 / CUTOFF**2)[:, None] * v
    forces = np.zeros_like(system.positions)
    np.add.at(forces, receiver, -gradient)
    np.add.at(forces, sender, gradient)
    return float((strength * (1 - square) ** 3).sum()), forces


def assert_right(step: Step, system: System) -> None:
    outcome = step(system)
    energy, forces = expected(system)
    size = 64 * np.finfo(np.float64).eps * max(1.0, np.abs(forces).max()) * 30
    assert abs(outcome.energies.sum() - energy) <= 64 * np.finfo(np.float64).eps * max(1.0, energy)
    assert np.abs(outcome.forces[0] - forces).max(initial=0.0) <= size

"""Structures to verify models on, generated without any library of atoms, the same ones at every call."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Structure:
    """Atoms and their neighbours, as plain float64 tensors on the CPU.

    Attributes:
        name: What messages call it.
        positions: (num_atoms, 3), angstrom.
        cell: (3, 3), a lattice vector per row, angstrom; a box around the atoms if not periodic.
        periodic: Whether the cell repeats in all three directions.
        species: (num_atoms,), index of each atom's element among those of the model.
        edge_index: (2, num_edges), senders and receivers; sorted by sender if every edge counts once.
        unit_shifts: (num_edges, 3), lattice vectors to add in `positions[receiver] - positions[sender] + shift`.
        cutoff: Radius that the neighbours were searched in, angstrom.
        counts: (num_edges,), how many edges each one stands for; None: for itself.
    """

    name: str
    positions: torch.Tensor
    cell: torch.Tensor
    periodic: bool
    species: torch.Tensor
    edge_index: torch.Tensor
    unit_shifts: torch.Tensor
    cutoff: float
    counts: torch.Tensor | None = None

    def written_out(self) -> Structure:
        """The same with each edge as often as it counts, all of them in turn, so that equal ones are far apart."""
        if self.counts is None:
            return self
        order = torch.cat([torch.nonzero(self.counts > number).flatten() for number in range(int(self.counts.max()))])
        return replace(self, edge_index=self.edge_index[:, order], unit_shifts=self.unit_shifts[order], counts=None)

    def rotated(self, rotation: torch.Tensor) -> Structure:
        """The same structure in another frame, with the very same edges."""
        return self.deformed(rotation, f"{self.name} (rotated)")

    def deformed(self, matrix: torch.Tensor, name: str) -> Structure:
        """The same edges where `matrix` (3, 3) takes every vector to another one."""
        return replace(self, name=name, positions=self.positions @ matrix.T, cell=self.cell @ matrix.T)

    def displaced(self, displacement: torch.Tensor) -> Structure:
        """The same edges after each atom has moved by its row of (num_atoms, 3), angstrom."""
        return replace(self, name=f"{self.name} (displaced)", positions=self.positions + displacement)


def small_structures(cutoff: float, num_species: int) -> list[Structure]:
    """Builds one periodic and one isolated structure.

    The periodic one is a jittered 2x2x2 lattice in a sheared cell smaller than the cutoff, so atoms see several images
    of their neighbours and of themselves. The isolated one adds an atom with few neighbours and one with none.

    Args:
        cutoff: Cutoff radius of the model, angstrom.
        num_species: Number of elements the model knows; the atoms are spread evenly over them.
    """
    positions, cell = _lattice((2, 2, 2), 0.45 * cutoff)
    box = 8 * cutoff * torch.eye(3, dtype=torch.float64)
    far = torch.tensor([[-0.8, 0.1, 0.05], [3.5, 0.0, 0.0]], dtype=torch.float64) * cutoff
    return [
        _structure("periodic structure", positions, cell, True, num_species, cutoff),
        _structure("isolated structure", torch.cat([positions, far]), box, False, num_species, cutoff),
    ]


def crowded_structure(cutoff: float, num_species: int) -> Structure:
    """Builds a periodic structure of some three thousand edges, whose atoms have very different numbers of them.

    Kernels share out their work by numbers of edges, of all nodes and of one: here one atom has more than a thousand
    edges, most have about a hundred, some have few, and some have none. Atoms differ in how far they see, and each edge
    stands for several, as in no physical structure: to a model they are so many atoms in one place.

    Args:
        cutoff: Cutoff radius of the model, angstrom.
        num_species: Number of elements the model knows.
    """
    whole = _structure("crowded structure", *_lattice((2, 3, 3), 0.27 * cutoff), True, num_species, cutoff)
    hub, lonely, alone = 0, [5, 9], [13, 17]
    sight = torch.full((len(whole.positions),), 0.8, dtype=torch.float64)
    sight[hub], sight[lonely], sight[alone] = 1.25, 0.4, 0.0
    senders, receivers = whole.edge_index
    vectors = whole.positions[receivers] - whole.positions[senders] + whole.unit_shifts @ whole.cell
    lengths = vectors.norm(dim=1) / cutoff  # an edge and its reverse have one length
    of_hub = (whole.edge_index == hub).any(0)
    of_lonely = torch.isin(whole.edge_index, torch.tensor(lonely)).any(0)
    # Many near neighbours in one place would have features so large that networks multiply rounding.
    nearest = torch.where(of_hub, 0.75, 0.55).masked_fill(of_lonely, 0.0)
    kept = (lengths > nearest) & (lengths < sight[senders] * sight[receivers])
    counts = torch.where(of_hub, 12, 4).masked_fill(of_lonely, 2)
    return replace(
        whole, edge_index=whole.edge_index[:, kept], unit_shifts=whole.unit_shifts[kept], counts=counts[kept]
    )


def _lattice(repeats: tuple[int, int, int], spacing: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of a jittered lattice, and its sheared cell."""
    generator = torch.Generator().manual_seed(20240521)  # a generator of its own: the global RNG stays untouched
    lattice = torch.cartesian_prod(*[torch.arange(n, dtype=torch.float64) for n in repeats]) * spacing
    lattice += spacing * 0.2 * (torch.rand(lattice.shape, generator=generator, dtype=torch.float64) - 0.5)
    sheared = torch.tensor([[1.0, 0.0, 0.0], [0.1, 1.0, 0.0], [0.05, -0.1, 1.0]], dtype=torch.float64)
    return lattice, torch.tensor(repeats, dtype=torch.float64)[:, None] * spacing * sheared


def _structure(
    name: str, positions: torch.Tensor, cell: torch.Tensor, periodic: bool, num_species: int, cutoff: float
) -> Structure:
    species = (torch.arange(len(positions)) * max(1.0, num_species / len(positions))).long() % num_species
    edge_index, unit_shifts = _neighbours(positions, cell, periodic, cutoff)
    return Structure(name, positions, cell, periodic, species, edge_index, unit_shifts, cutoff)


def _neighbours(
    positions: torch.Tensor, cell: torch.Tensor, periodic: bool, cutoff: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """All ordered pairs within the cutoff, by trying every pair of atoms and every image that could matter."""
    images = torch.zeros(1, 3, dtype=torch.float64)
    if periodic:
        heights = 1.0 / torch.linalg.inv(cell).norm(dim=0)
        reach = [math.ceil(cutoff / height) + 1 for height in heights.tolist()]
        images = torch.cartesian_prod(*[torch.arange(-n, n + 1, dtype=torch.float64) for n in reach])
    vectors = positions[None, :, None] - positions[:, None, None] + images @ cell
    near = vectors.norm(dim=-1) < cutoff
    itself = torch.eye(len(positions), dtype=torch.bool)[:, :, None] & (images == 0).all(dim=-1)
    senders, receivers, image = torch.nonzero(near & ~itself, as_tuple=True)
    return torch.stack([senders, receivers]), images[image]

"""What candidates were found for, kept on the device, where it is compared with what there is now."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eqaccel.step.candidates import EXACT
from eqaccel.step.memory import Memory
from eqaccel.step.system import System

_INVERTED = 1e-12
"""How far a cell times its inverse may be from the unit matrix: beyond that, `EXACT` does not cover the rounding."""


@dataclass(frozen=True)
class Given:
    """A system as tensors on the device of a step, which are only read.

    Attributes:
        positions: (num_atoms, 3) of any floating-point type, angstrom.
        cells: (num_structures, 3, 3), the same, a cell vector in each row.
        numbers: (num_atoms,) integers, from which types follow.
        structure: (num_atoms,) integers, the structure of each atom.
        periodic: Which cell vectors of all structures are periods: a tensor of three, or one answer for all.
    """

    positions: Tensor
    cells: Tensor
    numbers: Tensor
    structure: Tensor
    periodic: Tensor | bool


class Known:
    """A system whose candidates there are, and room for the one that there is now.

    Args:
        memory: Where the candidates are; `differs` writes into its positions, `put` into its cells.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        like, atoms, structures = memory.positions, len(memory.positions), len(memory.cells)
        self._positions = torch.zeros_like(like)
        labels = like.new_zeros((2, 2 * atoms + 3), dtype=torch.int64)
        self._labels, self._known_labels = labels  # numbers, structures and periods: of now, and of then
        # Of then: positions in units of cell vectors; inverses of cells, of atoms with zeros where nothing is periodic;
        # cells, completed, and which of their vectors are periods; the first atom of each structure, and the end.
        self._fractions = like.new_zeros((atoms, 3, 1))
        self._inverse_of_atoms = like.new_zeros((atoms, 3, 3))
        self._inverse = like.new_zeros((structures, 3, 3))
        self._completed = like.new_zeros((structures, 3, 3))
        self._periods = like.new_zeros((structures, 3, 1), dtype=torch.bool)
        self._starts = like.new_zeros(structures + 1, dtype=torch.int64)

    def learn(self, system: System, given: Given) -> None:
        """Takes note of a system for which candidates were found.

        Args:
            system: The system, whose sizes are those of the memory.
            given: The same on the device.
        """
        cells, structure = system.completed_cells, system.structure
        inverse = np.linalg.inv(cells)
        if np.abs(cells @ inverse - np.eye(3)).max() > _INVERTED:
            inverse = np.full_like(inverse, np.nan)  # it serves for nothing then
        of_atoms = inverse[structure]
        spare = np.broadcast_to(np.eye(3), self._inverse.shape)
        self._positions.zero_()
        self._labels.zero_()
        _fill(self._fractions, np.einsum("ni,nij->nj", system.positions, of_atoms)[:, :, None])
        _fill(self._inverse_of_atoms, of_atoms * system.periodic[structure][:, None, :])
        _fill(self._inverse, np.concatenate([inverse, spare[len(inverse) :]]))
        _fill(self._completed, np.concatenate([cells, spare[len(inverse) :]]))
        _fill(self._periods, system.periodic[:, :, None])
        ends = np.cumsum(system.sizes)
        _fill(self._starts, np.concatenate([[0], ends, np.repeat(ends[-1:], len(spare) - len(ends))]))
        self.put(given)
        self._known_labels.copy_(self._labels)

    def has_size_of(self, given: Given) -> bool:
        """Whether a system has as many atoms and structures."""
        sizes = self.memory.sizes
        return (len(given.positions), len(given.cells)) == (sum(sizes), len(sizes))

    def put(self, given: Given) -> None:
        """Puts a system of this size where `differs` reads it."""
        atoms, room = len(given.positions), len(self._positions)
        self._positions[:atoms].copy_(given.positions)
        self.memory.cells[: len(given.cells)].copy_(given.cells)
        self._labels[:atoms].copy_(given.numbers)
        self._labels[room : room + atoms].copy_(given.structure)
        periodic = self._labels[2 * room :]
        periodic.copy_(given.periodic) if isinstance(given.periodic, Tensor) else periodic.fill_(given.periodic)

    def differs(self, cutoff: float, skin: float) -> Tensor:
        """Whether candidates may lack a pair that is within the cutoff now, or types may be others; (1,) bool.

        This is `Candidates.serve` for a device. Here, F takes what is not periodic for what it was, and the smallest
        singular value of F is replaced by a bound that is below: the least eigenvalue of its symmetric part, after
        Gershgorin. Atoms that were put back into a cell are put where they were before, by whole cell vectors; those of
        then tell how many, which is right as long as atoms are near again afterwards.
        """
        memory = self.memory
        now = torch.where(self._periods, memory.cells, self._completed)
        change = self._inverse @ now
        twice = change + change.mT
        sides = twice.diagonal(dim1=1, dim2=2)
        least = (sides + sides.abs() - twice.abs().sum(2)).amin(1) / 2
        # Twice the way that an atom may have gone; not a number if a cell has such a one, periodic or not.
        allowed = least * (EXACT * (cutoff + skin)) - cutoff + 0 * memory.cells.sum((1, 2))
        allowed = torch.where(allowed >= 0, allowed.square() / 4, -1.0)
        cells = now.index_select(0, memory.structure)
        way = self._positions - (self._fractions * cells).sum(1)
        away = (way[:, :, None] * self._inverse_of_atoms).sum(1).round()
        shift = (away[:, :, None] * cells).sum(1)
        torch.sub(self._positions, shift, out=memory.positions)
        near = (way - shift).square().sum(1) <= allowed.index_select(0, memory.structure)
        same = self._labels == self._known_labels
        return ~torch.cat([near, same]).all(0, keepdim=True)

    def of_structures(self, values: Tensor) -> Tensor:
        """Sums of the rows of each structure, in a fixed order; zeros where there are none."""
        sums: Tensor = torch.segment_reduce(values, "sum", offsets=self._starts, axis=0, unsafe=True, initial=0)
        return sums


def _fill(to: Tensor, values: NDArray[np.generic]) -> None:
    """Puts rows in front, and zeros behind them."""
    to[: len(values)].copy_(torch.from_numpy(np.ascontiguousarray(values)))
    to[len(values) :].zero_()

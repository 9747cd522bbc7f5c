"""Pairs of atoms of many small structures at once: every pair is looked at, in as many images as may be near.

The list of one structure is hardly any work for a GPU, but some fifty calls of its driver, and it waits for several of
them. Here there are some eighty for all structures, and one wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eqaccel.step.system import System

MOST = 1 << 20
"""Images that are looked at in one go, for which there are some 250 bytes each meanwhile."""

_MARGIN = 1e-6
"""In cell vectors: by how much more images are looked at, for the rounding of atoms that are many cells away."""


class AllPairs:
    """Looks at all pairs of atoms of structures, on a device.

    Args:
        system: The structures, with cells that span a volume.
        reach: Angstrom; pairs are shorter than that. Those for which this is only a matter of rounding may be missing.

    Attributes:
        num_images: (num_structures,) float64, how many images of pairs there are to look at in each structure.
    """

    def __init__(self, system: System, reach: float) -> None:
        self._system, self._reach, self._cells = system, reach, system.completed_cells
        self._inverse = np.asarray(np.linalg.inv(self._cells), dtype=np.float64)
        self._sizes = np.array(system.sizes, dtype=np.int64)
        # How many cell vectors a pair may be long; 0 where nothing is periodic.
        self._widths = (np.linalg.norm(self._inverse, axis=1) * reach + _MARGIN) * system.periodic
        self.num_images = np.square(self._sizes, dtype=np.float64) * _rows(self._widths).prod(axis=1)

    def find(self, chosen: NDArray[np.int64], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """The pairs of some structures, in the order (receiver, sender, shift).

        What a structure gets does not depend on which others there are.

        Args:
            chosen: (num_chosen,), which structures, in ascending order; at least one.
            device: Where to look, and where the pairs are.

        Returns:
            Receivers (num_pairs,) and senders (num_pairs,) int64, shifts (num_pairs, 3) int32.
        """
        positions, structure = self._system.positions, self._system.structure
        fractions = np.einsum("ni,nij->nj", positions, self._inverse[structure]) * self._system.periodic[structure]
        atoms = torch.from_numpy(np.concatenate([positions, fractions], axis=1)).to(device)
        found = [_find(self._part(part, device), atoms, self._reach) for part in self._split(chosen)]
        receiver, sender, shift = (torch.cat(tensors) for tensors in zip(*found, strict=True))
        return receiver, sender, shift

    def _split(self, chosen: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """The structures, in portions of no more than `MOST` images or one structure."""
        begin, held = 0, 0.0
        for end, count in enumerate(self.num_images[chosen]):
            if end > begin and held + count > MOST:
                yield chosen[begin:end]
                begin, held = end, 0.0
            held += count
        yield chosen[begin:]

    def _part(self, chosen: NDArray[np.int64], device: torch.device) -> _Part:
        sizes, widths, rows = self._sizes[chosen], self._widths[chosen], _rows(self._widths[chosen]).astype(np.int64)
        images, pairs = rows.prod(axis=1), sizes**2
        lowest = -np.ceil(-widths).astype(np.int64)  # of an atom's images, how far the first is from the atom itself
        own = (lowest[:, 0] * rows[:, 1] + lowest[:, 1]) * rows[:, 2] + lowest[:, 2]
        firsts = (np.cumsum(self._sizes) - self._sizes)[chosen]
        columns = [sizes, firsts, pairs, _starts(pairs), images, _starts(images), own, widths]
        table = np.column_stack([*columns, self._cells[chosen].reshape(-1, 9)])
        steps = np.concatenate([np.indices(shape).reshape(3, -1).T for shape in rows]).astype(np.float64)
        vectors = np.einsum("ni,nij->nj", steps, np.repeat(self._cells[chosen], images, axis=0))
        return _Part(
            torch.from_numpy(table).to(device),
            torch.from_numpy(np.concatenate([vectors, steps], axis=1)).to(device),
            int(pairs.sum()),
            int((pairs * images).sum()),
        )


@dataclass(frozen=True)
class _Part:
    """Structures that are looked at in one go.

    Attributes:
        table: (num_structures, 19) float64: number of atoms, first atom, number of pairs, first pair, images of a pair,
            first image, which image of an atom is the atom itself, how many cell vectors a pair may be long, cell.
        images: (num_images, 6) float64: for each structure, the images of a sender, seen from the first: vector, and
            how many cell vectors.
        num_pairs: Of all structures.
        num_images: Of all pairs.
    """

    table: Tensor
    images: Tensor
    num_pairs: int
    num_images: int


def _find(part: _Part, atoms: Tensor, reach: float) -> tuple[Tensor, Tensor, Tensor]:
    receiver, sender, structure = _pairs(part)
    way, lowest = _ways(part, atoms, receiver, sender, structure)
    own = torch.where(receiver == sender, _whole(part, 6)[structure], -1)
    pair, image = _near(part, way, own, structure, reach)
    return receiver[pair], sender[pair], (lowest[pair] + part.images[image, 3:]).int()


def _pairs(part: _Part) -> tuple[Tensor, Tensor, Tensor]:
    """Receiver, sender and structure of each pair of atoms."""
    size, first, count, first_pair = (_whole(part, column) for column in range(4))
    structure = _repeated(count, part.num_pairs)
    number = torch.arange(part.num_pairs, device=size.device) - first_pair[structure]
    receiver = torch.div(number, size[structure], rounding_mode="floor")
    sender = number - receiver * size[structure]
    return receiver + first[structure], sender + first[structure], structure


def _ways(part: _Part, atoms: Tensor, receiver: Tensor, sender: Tensor, structure: Tensor) -> tuple[Tensor, Tensor]:
    """From the first image of the sender to the receiver, and by how many cell vectors that image is shifted."""
    way = atoms[receiver] - atoms[sender]
    lowest = torch.ceil(way[:, 3:] - part.table[:, 7:10][structure])
    way = way[:, :3].contiguous()
    for axis in range(3):  # each row by itself, in this order, whatever other rows there are
        way -= lowest[:, axis, None] * part.table[:, 10 + 3 * axis : 13 + 3 * axis][structure]
    return way, lowest


def _near(part: _Part, way: Tensor, own: Tensor, structure: Tensor, reach: float) -> tuple[Tensor, Tensor]:
    """The images of pairs within reach: which pair, and which image of its structure."""
    count, first_image = _whole(part, 4)[structure], _whole(part, 5)[structure]
    pair = _repeated(count, part.num_images)
    number = torch.arange(part.num_images, device=way.device) - (count.cumsum(0) - count)[pair]
    image = number + first_image[pair]
    vectors = way[pair] - part.images[:, :3][image]
    x, y, z = vectors.square_().unbind(1)
    (found,) = ((x + y + z < reach**2) & (number != own[pair])).nonzero(as_tuple=True)
    return pair[found], image[found]


def _rows(widths: NDArray[np.float64]) -> NDArray[np.float64]:
    """In how many cells in a row the sender of a pair may be."""
    return np.floor(2 * widths) + 1


def _whole(part: _Part, column: int) -> Tensor:
    """A column of whole numbers of the table."""
    return part.table[:, column].long()


def _repeated(counts: Tensor, total: int) -> Tensor:
    """Each index as often as its count says; their sum is given, which saves a wait for the device."""
    return torch.arange(len(counts), device=counts.device).repeat_interleave(counts, output_size=total)


def _starts(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    starts: NDArray[np.int64] = np.cumsum(counts) - counts
    return starts

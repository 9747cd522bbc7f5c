"""Pairs of atoms that may be neighbours for some steps: found for a larger cutoff, kept until atoms have moved too far.

The list of a structure is made by vesin, which has one for CPUs and for NVIDIA GPUs, but for small structures on a GPU:
it takes 1.5 ms for each of them, so `AllPairs` makes their lists at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import vesin
from numpy.typing import NDArray
from torch import Tensor

from eqaccel.ops import CandidateTensors
from eqaccel.step.all_pairs import MOST, AllPairs
from eqaccel.step.system import System


@dataclass(frozen=True)
class Candidates:
    """All pairs of atoms within `cutoff + skin`, where the atoms were when they were found.

    Attributes:
        tensors: The pairs.
        system: The system that they were found for; its arrays are copies.
        cutoff: Angstrom.
        skin: Angstrom.
    """

    tensors: CandidateTensors
    system: System
    cutoff: float
    skin: float

    @classmethod
    def find(cls, system: System, cutoff: float, skin: float, device: torch.device) -> Candidates:
        """Finds the pairs of a system; they lie on the device."""
        return cls(_pairs(system, cutoff + skin, device), system.copy(), cutoff, skin)

    def serve(self, now: System) -> System | None:
        """The system, if all pairs that are within the cutoff now are among these; None if one may be missing.

        Take F, which turns the cell of then into that of now, and u, how far each atom is from where F alone would have
        brought it. A vector between two atoms was d and is d F + u_j - u_i. So a pair that is shorter than the cutoff
        now was shorter than (cutoff + 2 max |u|) / s then, with s the smallest singular value of F.

        Programs put atoms that leave a cell back in on its other side. If that is what keeps the pairs from serving,
        the system that is returned has the atoms where they were before, by whole cell vectors.

        None for a system that `System.check` refuses: of numbers that are not finite, or a cell without a volume.
        """
        moved = self._moved(now)
        if moved is None:
            return None
        way, shrunk = moved
        reach = shrunk * (self.cutoff + self.skin) * EXACT
        if self._near(way, reach):
            return now
        if not now.periodic.any() or not np.isfinite(way).all() or not (reach > self.cutoff).all():
            return None
        away = self._whole_cells(now, way)
        back = replace(now, positions=now.positions - away)
        return back if self._near(way - away, reach) else None

    def farthest(self, now: System) -> float:
        """How far an atom has gone since, angstrom, cells and their changes left out; infinity for other structures."""
        moved = self._moved(now)
        if moved is None or not np.isfinite(moved[0]).all():
            return np.inf
        way = moved[0] - self._whole_cells(now, moved[0])
        return float(np.sqrt(np.einsum("ij,ij->i", way, way).max(initial=0.0)))

    def _moved(self, now: System) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
        """For `serve`: u of each atom, and s of each structure; None for other structures."""
        then = self.system
        if now.sizes != then.sizes or now.periodic.tobytes() != then.periodic.tobytes():
            return None
        if now.cells.tobytes() == then.cells.tobytes():
            return now.positions - then.positions, np.ones(len(then.sizes))
        if not np.isfinite(now.cells).all():
            return None
        change = np.linalg.solve(then.completed_cells, now.completed_cells)
        was = np.einsum("ni,nij->nj", then.positions, change[then.structure])
        return now.positions - was, np.linalg.norm(change, -2, axis=(1, 2))

    def _whole_cells(self, now: System, way: NDArray[np.float64]) -> NDArray[np.float64]:
        """The sums of cell vectors nearest to some vectors of atoms."""
        cells, structure = now.completed_cells, self.system.structure
        numbers = np.rint(np.einsum("ni,nij->nj", way, np.linalg.inv(cells)[structure]))
        return np.einsum("ni,nij->nj", numbers * now.periodic[structure], cells[structure])

    def _near(self, way: NDArray[np.float64], reach: NDArray[np.float64]) -> bool:
        """Whether the atoms of each structure have moved so little that pairs up to a reach serve."""
        moved = np.sqrt(self.system.of_structures(np.maximum, np.einsum("ij,ij->i", way, way)))
        return bool((self.cutoff + 2 * moved <= reach).all())


EXACT = 1 - 1e-9
"""Leaves room for the rounding of distances, in the list and here."""


MOST_IMAGES = {"cpu": 0, "cuda": MOST}
"""Of the pairs of a structure, up to which all are looked at, by device: a CPU has the list of a library sooner."""


def _pairs(system: System, reach: float, device: torch.device) -> CandidateTensors:
    receiver, sender, shift = _sorted_pairs(system, reach, device)
    t_order = torch.argsort(sender, stable=True)
    nodes = torch.arange(len(system.positions) + 1, device=device)
    starts = [torch.searchsorted(rows.contiguous(), nodes, out_int32=True) for rows in (receiver, sender[t_order])]
    return CandidateTensors(starts[0], sender.int(), shift.contiguous(), starts[1], t_order.int())


def _sorted_pairs(system: System, reach: float, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Receivers, senders and shifts of all structures: of the small ones at once, of each other one by itself."""
    sizes = np.array(system.sizes)
    all_pairs = AllPairs(system, reach)
    is_large = all_pairs.num_images > MOST_IMAGES[device.type]
    is_small, large = ~is_large & (sizes > 0), np.flatnonzero(is_large)
    found = [all_pairs.find(np.flatnonzero(is_small), device)] if is_small.any() else []
    ends = np.cumsum(sizes)
    for number in large:
        begin, end = int(ends[number] - sizes[number]), int(ends[number])
        cell, periodic = system.completed_cells[number], system.periodic[number]
        receiver, sender, shift = _list_of(system.positions[begin:end], cell, periodic, reach, device)
        found.append((receiver + begin, sender + begin, shift))
    receiver, sender, shift = (torch.cat(tensors) for tensors in zip(*found, strict=True))
    if not large.size:
        return receiver, sender, shift
    order = _order(receiver, sender, shift)
    return receiver[order], sender[order], shift[order]


def _list_of(
    positions: NDArray[np.float64],
    cell: NDArray[np.float64],
    periodic: NDArray[np.bool_],
    reach: float,
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor]:
    """Receivers (num_pairs,) int64, senders (num_pairs,) int64 and shifts (num_pairs, 3) int32 of one structure.

    The cell is a completed one.
    """
    points, box = torch.from_numpy(positions), torch.from_numpy(cell)
    search = vesin.NeighborList(cutoff=reach, full_list=True)
    # vesin has no list for other GPUs, and the one that it has leaves out pairs of atoms in one place.
    if device.type == "cuda" and not torch.version.hip and not _some_coincide(positions, cell, periodic):
        try:
            found = search.compute(points.to(device), box.to(device), periodic.tolist(), "ijS")
        except RuntimeError as error:
            if "maximum capacity" not in str(error):  # of pairs of an atom, as in a small cell, which a CPU soon has
                raise
            found = search.compute(points, box, periodic.tolist(), "ijS")
    else:
        found = search.compute(points, box, periodic.tolist(), "ijS")
    first, second, shift = found
    return first.to(device).long(), second.to(device).long(), shift.to(device).int()


def _some_coincide(positions: NDArray[np.float64], cell: NDArray[np.float64], periodic: NDArray[np.bool_]) -> bool:
    """Whether atoms may be in one place, in periodic images too: they are in one box of a fine grid of the cell.

    Rounding may put the same place on both sides of a wall, so there is a second grid, whose walls are elsewhere.
    """
    fractions = positions @ np.linalg.inv(cell)
    for offset in (0.0, 0.5):
        boxes = np.floor(fractions * _GRID + offset).astype(np.int64)
        boxes[:, periodic] %= _GRID
        keys = (boxes[:, 0] * _GRID + boxes[:, 1]) * _GRID + boxes[:, 2]
        if np.unique(keys).size < len(keys):
            return True
    return False


_GRID = 1 << 20


def _order(receiver: Tensor, sender: Tensor, shift: Tensor) -> Tensor:
    """The permutation that sorts pairs by receiver, sender and shift, in one sort where the numbers are small."""
    if receiver.numel() == 0:
        return receiver
    largest = int(shift.abs().max())
    width, nodes = 2 * largest + 1, int(receiver.max()) + 1
    if width**3 * nodes**2 < 2**62:
        key = receiver * nodes + sender
        for axis in range(3):
            key = key * width + (shift[:, axis] + largest)
        return torch.argsort(key)
    order = torch.arange(receiver.numel(), device=receiver.device)
    for keys in (shift[:, 2], shift[:, 1], shift[:, 0], sender, receiver):  # stable sorts, the last key first
        order = order[torch.argsort(keys[order], stable=True)]
    return order

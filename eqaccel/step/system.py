"""The atoms of one structure or of several, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from eqaccel.errors import StructureError


@dataclass(frozen=True)
class System:
    """Atoms of one structure or of several, one after the other; nothing is copied.

    Attributes:
        positions: (num_atoms, 3) float64, angstrom.
        cells: (num_structures, 3, 3) float64, a cell vector in each row; what is not periodic may be zero.
        periodic: (num_structures, 3) bool.
        types: (num_atoms,) int64, what the potential calls the element of each atom.
        sizes: Number of atoms of each structure.
    """

    positions: NDArray[np.float64]
    cells: NDArray[np.float64]
    periodic: NDArray[np.bool_]
    types: NDArray[np.int64]
    sizes: tuple[int, ...]

    @classmethod
    def join(cls, systems: Sequence[System]) -> System:
        """Several systems as one."""
        if len(systems) == 1:
            return systems[0]
        return cls(
            positions=np.concatenate([s.positions for s in systems]),
            cells=np.concatenate([s.cells for s in systems]),
            periodic=np.concatenate([s.periodic for s in systems]),
            types=np.concatenate([s.types for s in systems]),
            sizes=tuple(size for s in systems for size in s.sizes),
        )

    def copy(self) -> System:
        """The same in memory of its own."""
        return System(
            self.positions.copy(), self.cells.copy(), self.periodic.copy(), self.types.copy(), tuple(self.sizes)
        )

    @cached_property
    def structure(self) -> NDArray[np.int64]:
        """(num_atoms,), the structure of each atom."""
        return np.repeat(np.arange(len(self.sizes)), self.sizes)

    @cached_property
    def completed_cells(self) -> NDArray[np.float64]:
        """The cells, `completed`."""
        full = self.cells.copy()
        full[~self.periodic.any(axis=1)] = np.eye(3)
        for number in np.flatnonzero(self.periodic.any(axis=1) & ~self.periodic.all(axis=1)):
            full[number] = completed(self.cells[number], self.periodic[number])
        return full

    def of_structures(self, function: np.ufunc, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """What a function such as `np.add` makes of the rows of each structure, in their order; 0 where there are none.

        Args:
            function: Of two numbers.
            values: (num_atoms, ...).
        """
        sizes = np.array(self.sizes)
        results = np.zeros((len(sizes), *values.shape[1:]))
        filled = sizes > 0
        if filled.any():
            starts = np.cumsum(sizes[filled]) - sizes[filled]
            results[filled] = function.reduceat(values, starts, axis=0)
        return results

    def check(self) -> None:
        """Raises `StructureError` if the system cannot be computed."""
        if not np.isfinite(self.positions).all():
            atom = int(np.flatnonzero(~np.isfinite(self.positions).all(axis=1))[0])
            raise StructureError(
                f"positions: expected finite numbers, got {self.positions[atom].tolist()} for atom {atom}; the "
                f"simulation has become unstable, or its input is damaged"
            )
        finite = np.isfinite(self.cells).all(axis=(1, 2))
        if not finite.all():
            raise StructureError(f"cell: expected finite numbers, got {self.cells[np.argmin(finite)].tolist()}")
        lengths = np.where(self.periodic, np.linalg.norm(self.cells, axis=2), 1.0)
        flat = np.abs(np.linalg.det(self.completed_cells)) <= 1e-10 * lengths.prod(axis=1)
        flat &= self.periodic.any(axis=1)
        if flat.any():
            number = int(np.argmax(flat))
            raise StructureError(
                f"cell: expected cell vectors that span a volume in the periodic directions, got "
                f"{self.cells[number].tolist()} with periodic {self.periodic[number].tolist()}; set the cell, or "
                f"switch off periodic boundaries"
            )


def completed(cell: NDArray[np.float64], periodic: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The cell with unit vectors, orthogonal to the periodic ones and to each other, where it is not periodic."""
    if periodic.all():
        return cell
    full = cell.copy()
    # The last right singular vectors are orthogonal to all rows; (0, 3) gives the unit matrix.
    full[~periodic] = np.linalg.svd(cell[periodic])[2][int(periodic.sum()) :]
    return full

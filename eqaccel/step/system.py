"""The atoms of one structure or of several, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

    def check(self) -> None:
        """Raises `StructureError` if the system cannot be computed."""
        if not np.isfinite(self.positions).all():
            atom = int(np.flatnonzero(~np.isfinite(self.positions).all(axis=1))[0])
            raise StructureError(
                f"positions: expected finite numbers, got {self.positions[atom].tolist()} for atom {atom}; the "
                f"simulation has become unstable, or its input is damaged"
            )
        if not np.isfinite(self.cells).all():
            raise StructureError(f"cell: expected finite numbers, got {self.cells.tolist()}")
        for cell, periodic in zip(self.cells, self.periodic, strict=True):
            lengths = np.linalg.norm(cell, axis=1)
            if periodic.any() and abs(np.linalg.det(completed(cell, periodic))) <= 1e-10 * lengths[periodic].prod():
                raise StructureError(
                    f"cell: expected cell vectors that span a volume in the periodic directions, got {cell.tolist()} "
                    f"with periodic {periodic.tolist()}; set the cell, or switch off periodic boundaries"
                )


def completed(cell: NDArray[np.float64], periodic: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The cell with unit vectors, orthogonal to the periodic ones and to each other, where it is not periodic."""
    if periodic.all():
        return cell
    full = cell.copy()
    # The last right singular vectors are orthogonal to all rows; (0, 3) gives the unit matrix.
    full[~periodic] = np.linalg.svd(cell[periodic])[2][int(periodic.sum()) :]
    return full

"""Linear maps between irreps, with weights that may depend on attributes of a row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from eqaccel.errors import SpecError
from eqaccel.irreps import Irreps, IrrepsLike

MAX_COMPONENTS = 256
"""Of an irrep: a GPU block takes all components of a row together."""


class LinearPath(NamedTuple):
    """One block of the map: coefficient * sum over u of W[u, z, w] x[u] is added to output w, for every component.

    Attributes:
        source: Number of the block of irreps_in that is read.
        target: Number of the block of irreps_out that is added to.
        coefficient: Factor of all its weights.
    """

    source: int
    target: int
    coefficient: float


@dataclass(frozen=True)
class LinearSpec:
    """A linear map of irreps: each row is multiplied by a matrix for each path, the same for all components.

    With attributes a of the row, the matrix of a path is the sum over z of a[z] W[:, z, :], so that a one-hot row takes
    the matrix of its own. Weights of the paths follow each other, each (mul_in, num_attributes, mul_out), or
    (mul_in, mul_out) where there are no attributes.

    Args:
        irreps_in: Of the rows that are read, in (mul, 2l + 1) layout.
        irreps_out: Of the rows that are written, in the same layout.
        paths: The blocks of the map; several that add to one output are added up in this order.
        num_attributes: Attributes of a row; 0 for a map that is the same for all rows.

    Raises:
        SpecError: If a path names a block that there is not, joins irreps of other degrees or of more than 256
            components, or has a coefficient that is not finite; if there are no weights, or a negative number of
            attributes.
    """

    irreps_in: Irreps
    irreps_out: Irreps
    paths: tuple[LinearPath, ...]
    num_attributes: int

    def __init__(
        self,
        irreps_in: IrrepsLike,
        irreps_out: IrrepsLike,
        paths: tuple[LinearPath, ...],
        num_attributes: int = 0,
    ) -> None:
        object.__setattr__(self, "irreps_in", Irreps(irreps_in))
        object.__setattr__(self, "irreps_out", Irreps(irreps_out))
        object.__setattr__(self, "paths", tuple(LinearPath(*path) for path in paths))
        object.__setattr__(self, "num_attributes", num_attributes)
        if num_attributes < 0:
            raise SpecError(f"num_attributes: expected 0 or more, got {num_attributes}")
        for number, path in enumerate(self.paths):
            self._check(number, path)
        if self.weight_numel == 0:
            raise SpecError("paths: expected at least one with weights, got none: there is nothing to compute")

    @classmethod
    def of_all_pairs(cls, irreps_in: IrrepsLike, irreps_out: IrrepsLike, num_attributes: int = 0) -> LinearSpec:
        """The map with a path for every two blocks of the same irrep, as `e3nn.o3.Linear` makes it.

        Coefficients are one over the root of the number of products that are summed in an output.

        Args:
            irreps_in: As for the class.
            irreps_out: As for the class.
            num_attributes: As for the class.

        Raises:
            SpecError: As for the class.
        """
        read, written = Irreps(irreps_in), Irreps(irreps_out)
        pairs = [(i, k) for i, (_, source) in enumerate(read) for k, (_, ir) in enumerate(written) if source == ir]
        summed = [sum(read[i].mul for i, other in pairs if other == k) * max(num_attributes, 1) for _, k in pairs]
        paths = (LinearPath(i, k, 1 / math.sqrt(n or 1)) for (i, k), n in zip(pairs, summed, strict=True))
        return cls(read, written, tuple(paths), num_attributes)

    def _check(self, number: int, path: LinearPath) -> None:
        blocks = (("source", path.source, self.irreps_in), ("target", path.target, self.irreps_out))
        for name, index, irreps in blocks:
            if not 0 <= index < len(irreps):
                raise SpecError(f"paths[{number}].{name}: expected 0 to {len(irreps) - 1}, got {index}")
        source, target = self.irreps_in[path.source].ir, self.irreps_out[path.target].ir
        if source.l != target.l:
            raise SpecError(f"paths[{number}]: expected irreps of one degree, got {source} and {target}")
        if source.dim > MAX_COMPONENTS:
            raise SpecError(f"paths[{number}]: expected irreps of {MAX_COMPONENTS} components at most, got {source}")
        if not math.isfinite(path.coefficient):
            raise SpecError(f"paths[{number}].coefficient: expected a finite number, got {path.coefficient}")

    @property
    def num_matrices(self) -> int:
        """Matrices of a path."""
        return max(self.num_attributes, 1)

    def weight_shape(self, path: LinearPath) -> tuple[int, int, int]:
        """Shape (mul_in, num_matrices, mul_out) of the weights of a path."""
        return self.irreps_in[path.source].mul, self.num_matrices, self.irreps_out[path.target].mul

    @property
    def weight_offsets(self) -> tuple[int, ...]:
        """Where the weights of each path begin, and behind them where they end."""
        offsets = [0]
        for path in self.paths:
            offsets.append(offsets[-1] + math.prod(self.weight_shape(path)))
        return tuple(offsets)

    @property
    def weight_numel(self) -> int:
        """Number of weights."""
        return self.weight_offsets[-1]

"""Paths: instructions resolved into offsets and one coefficient each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eqaccel.irreps import Irrep
from eqaccel.wigner import scaled_wigner_3j


@dataclass(frozen=True)
class Path:
    """One coupling in mode uvu: z[u, k] += w[u] * sum_ij cg[i, j, k] x[u, i] y[j], for every channel u < mul.

    Offsets count elements from the start of a row of x, y, z or w. Those of x and z are where the whole block starts,
    which is the same in the layouts mul_ir and ir_mul.

    Attributes:
        in1: Index of the in1 block.
        in2: Index of the in2 block, whose multiplicity is 1.
        out: Index of the out block; several paths may add to the same one.
        mul: Number of channels, > 0.
        ir1: Irrep of the in1 block.
        ir2: Irrep of the in2 block.
        ir3: Irrep of the out block.
        x_offset: Start of the in1 block in a row of x.
        y_offset: Start of the in2 block in a row of y.
        z_offset: Start of the out block in a row of z.
        weight_offset: Start of this path's `mul` weights in a row of w, or None for a path without weights.
        coefficient: The factor in front of `wigner_3j` in the convention of e3nn 0.5 and later, whichever the
            spec has, with every normalisation folded in; it may be negative. To the last bit that of e3nn, whose
            rounding `cg` undoes where it is the root of a simple rational.
    """

    in1: int
    in2: int
    out: int
    mul: int
    ir1: Irrep
    ir2: Irrep
    ir3: Irrep
    x_offset: int
    y_offset: int
    z_offset: int
    weight_offset: int | None
    coefficient: float

    @property
    def l1(self) -> int:
        """Degree of the in1 block."""
        return self.ir1.l

    @property
    def l2(self) -> int:
        """Degree of the in2 block."""
        return self.ir2.l

    @property
    def l3(self) -> int:
        """Degree of the out block."""
        return self.ir3.l

    def cg(self) -> NDArray[np.float64]:
        """The coupling tensor with the coefficient folded in, of shape (2*l1+1, 2*l2+1, 2*l3+1), float64.

        Each entry is rounded once; see `scaled_wigner_3j`.
        """
        return scaled_wigner_3j(self.l1, self.l2, self.l3, self.coefficient).copy()

    def __str__(self) -> str:
        return f"{self.mul}x{self.ir1} (x) 1x{self.ir2} -> {self.mul}x{self.ir3}"

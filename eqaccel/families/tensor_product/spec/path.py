"""Paths: instructions resolved into offsets and one coefficient each."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eqaccel.families.tensor_product.spec.instruction import ConnectionMode, Mixing
from eqaccel.irreps import Irrep
from eqaccel.wigner import scaled_wigner_3j


@dataclass(frozen=True)
class Path:
    """One coupling of every pair of channels (u, v) that its mode has, and what becomes of the pairs.

    A pair's coupling is t[u, v, k] = sum_ij cg[i, j, k] x[u, i] y[v, j]. In mode uvu it adds w[u, v] t[u, v, k] to
    z[u, k]; see `ConnectionMode` for the others. A path that is in effect of mode uvu with one channel of in2 has that
    mode, whichever the instruction had.

    Offsets count elements from the start of a row of x, y, z or w. Those of x and z are where the whole block starts,
    which is the same in the layouts mul_ir and ir_mul; y is always laid out (mul, 2l+1), as in e3nn.

    Attributes:
        in1: Index of the in1 block.
        in2: Index of the in2 block.
        out: Index of the out block; several paths may add to the same one.
        mode: How channels connect.
        mul1: Number of channels u of the in1 block, > 0.
        mul2: Number of channels v of the in2 block, > 0.
        mul3: Number of channels of the out block, > 0.
        ir1: Irrep of the in1 block.
        ir2: Irrep of the in2 block.
        ir3: Irrep of the out block.
        x_offset: Start of the in1 block in a row of x.
        y_offset: Start of the in2 block in a row of y.
        z_offset: Start of the out block in a row of z.
        weight_offset: Start of this path's weights in a row of w, or None for a path without weights.
        coefficient: The factor in front of `wigner_3j` in the convention of e3nn 0.5 and later, whichever the
            spec has, with every normalisation folded in; it may be negative. To the last bit that of e3nn, whose
            rounding `cg` undoes where it is the root of a simple rational.
    """

    in1: int
    in2: int
    out: int
    mode: ConnectionMode
    mul1: int
    mul2: int
    mul3: int
    ir1: Irrep
    ir2: Irrep
    ir3: Irrep
    x_offset: int
    y_offset: int
    z_offset: int
    weight_offset: int | None
    coefficient: float

    @property
    def mul(self) -> int:
        """Number of channels of the output."""
        return self.mul3

    @property
    def pairs(self) -> int:
        """Number of pairs of channels that are coupled."""
        return self.mode.pairs.count(self.mul1, self.mul2)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the path's weights, as in e3nn; () for a path without weights."""
        return () if self.weight_offset is None else self.mode.weight_shape(self.mul1, self.mul2, self.mul3)

    @property
    def weight_numel(self) -> int:
        """Number of the path's weights."""
        return 0 if self.weight_offset is None else math.prod(self.weight_shape)

    @property
    def has_matrix(self) -> bool:
        """Whether its weights are a dense matrix between pairs of channels and channels of the output."""
        return self.weight_offset is not None and self.mode.mixing is Mixing.DENSE

    @property
    def is_channelwise(self) -> bool:
        """Whether each channel of in1 becomes one of the output, by the same matrix for all of them."""
        return self.mode is ConnectionMode.UVU and self.mul2 == 1

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
        text = f"{self.mul1}x{self.ir1} (x) {self.mul2}x{self.ir2} -> {self.mul3}x{self.ir3}"
        return text if self.is_channelwise else f"{text} {self.mode}"

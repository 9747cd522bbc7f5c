"""Spherical harmonics of edges as polynomials, which they are: one kernel in place of some hundred small operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eqaccel.errors import PatchError, UnsupportedError
from eqaccel.o3.harmonics import harmonics_polynomial
from eqaccel.patches.replacement import Replacement


class PolynomialHarmonics(Replacement):
    """An `e3nn.o3.SphericalHarmonics` of degree eleven at most."""

    note = "replaced by eqaccel.Polynomial"
    gains_on_cpu = True

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., 3) to (..., irreps_out.dim)."""
        if x.dim() == 2:
            return self.dense(x)
        shape = list(x.size()[:-1]) + [self.eqaccel.num_outputs]  # noqa: RUF005 (TorchScript)
        return self.dense(x.reshape(-1, 3)).view(shape)

    def dense(self, x: Tensor) -> Tensor:
        """`forward` of (num_edges, 3)."""
        if self.normalize:
            x = torch.ops.eqaccel.unit_vectors(x)[0]
        return self.eqaccel(x, x.new_ones(x.size(0), 1))

    def remake(self) -> torch.nn.Module:
        """See `Replacement`; another normalization may have been set, or vectors that have unit length already."""
        made: Any = polynomial_of(self)
        same: torch.nn.Module = self.eqaccel
        return same if made.spec == self.eqaccel.spec else made.to(self.eqaccel.payload.device)


def polynomial_of(harmonics: Any) -> torch.nn.Module:
    """The polynomials of a `SphericalHarmonics`.

    Raises:
        PatchError: If it has degrees above eleven.
    """
    try:
        return harmonics_polynomial(harmonics._ls_list, harmonics.normalization)
    except UnsupportedError as error:
        raise PatchError(str(error)) from error

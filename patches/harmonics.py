"""Spherical harmonics of edges as polynomials, which they are: one kernel in place of some hundred small operators."""

from __future__ import annotations

from itertools import combinations_with_replacement
from typing import Any

import torch
from eqaccel.patches.core import Replacement
from torch import Tensor

from eqaccel.errors import PatchError
from eqaccel.ops import Polynomial
from eqaccel.spec import MAX_POWER, PolynomialSpec, Term

_ROUNDING = 1e-12
"""Coefficients below this are zero, but for the rounding of their fit."""


class PolynomialHarmonics(Replacement):
    """Stands in for an `e3nn.o3.SphericalHarmonics` of degree three at most.

    Args:
        original: The module that the model came with.

    Raises:
        PatchError: If it has higher degrees.
    """

    note = "replaced by eqaccel.Polynomial"
    gains_on_cpu = True

    def __init__(self, original: Any) -> None:
        super().__init__(original)
        if original._lmax > MAX_POWER:
            raise PatchError(f"no kernel for spherical harmonics of degree {original._lmax}, above {MAX_POWER}")
        self.irreps_in, self.irreps_out = original.irreps_in, original.irreps_out
        self.normalize = original.normalize
        self.polynomial = Polynomial(_fit(original)).train(original.training)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (num_edges, 3) to (num_edges, irreps_out.dim)."""
        if x.dim() == 2:
            return self.dense(x)
        return self.original(x)

    def dense(self, x: Tensor) -> Tensor:
        """`forward`, under the name that all replacements of node-wise modules have it."""
        if self.normalize:
            x = torch.nn.functional.normalize(x, dim=-1)
        return self.polynomial(x, x.new_ones(x.size(0), 1))


def _fit(harmonics: Any) -> PolynomialSpec:
    """The polynomials that a module evaluates: those of degree l are homogeneous, so values on the sphere tell them."""
    points = torch.randn(64, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    points = torch.nn.functional.normalize(points)
    values = harmonics(points)
    terms, column = [], 0
    for degree in harmonics._ls_list:
        features = list(combinations_with_replacement(range(3), degree))
        monomials = torch.stack([points[:, list(f)].prod(1) for f in features], 1)
        size = 2 * degree + 1
        coefficients = torch.linalg.lstsq(monomials, values[:, column : column + size]).solution
        for number, output in (coefficients.abs() > _ROUNDING).nonzero().tolist():
            terms.append(Term(column + output, 0, features[number], float(coefficients[number, output])))
        column += size
    return PolynomialSpec(3, 1, column, tuple(terms))

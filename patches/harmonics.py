"""Spherical harmonics of edges as polynomials, which they are: one kernel in place of some hundred small operators."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from eqaccel.patches.replacement import Replacement
from numpy.typing import NDArray
from torch import Tensor

from eqaccel.errors import PatchError
from eqaccel.families.polynomial import MAX_POWER, PolynomialSpec, Term
from eqaccel.ops import Polynomial
from eqaccel.wigner import wigner_3j

_ROUNDING = 1e-12
"""Coefficients below this are zero but for rounding."""


class PolynomialHarmonics(Replacement):
    """An `e3nn.o3.SphericalHarmonics` of degree three at most."""

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
            x = torch.nn.functional.normalize(x, dim=-1)
        return self.eqaccel(x, x.new_ones(x.size(0), 1))


def harmonics_polynomial(harmonics: Any) -> Polynomial:
    """The polynomials of a `SphericalHarmonics`.

    Raises:
        PatchError: If it has degrees above three.
    """
    if harmonics._lmax > MAX_POWER:
        raise PatchError(f"no kernel for spherical harmonics of degree {harmonics._lmax}, above {MAX_POWER}")
    return Polynomial(_harmonics(harmonics))


def _harmonics(harmonics: Any) -> PolynomialSpec:
    """The polynomials of a module, in closed form: the same bits on every machine.

    Those of degree l + 1 are those of degree l coupled with the vector.
    """
    of_degree: list[list[dict[tuple[int, ...], float]]] = [[{(): 1.0}]]
    for degree in range(max(harmonics._ls_list)):
        of_degree.append(_couple(of_degree[-1], wigner_3j(degree, 1, degree + 1)))
    terms, output = [], 0
    for degree in harmonics._ls_list:
        size = 2 * degree + 1
        square = {"norm": 1.0, "component": size, "integral": size / (4 * math.pi)}[harmonics.normalization]
        for polynomial in of_degree[degree]:
            terms += [Term(output, 0, features, math.sqrt(square) * c) for features, c in polynomial.items()]
            output += 1
    return PolynomialSpec(3, 1, output, tuple(terms))


def _couple(lower: list[dict[tuple[int, ...], float]], coupling: NDArray) -> list[dict[tuple[int, ...], float]]:
    """Polynomials of the next degree, whose squares add up to one on the sphere."""
    higher: list[dict[tuple[int, ...], float]] = []
    for k in range(coupling.shape[2]):
        sums: dict[tuple[int, ...], float] = {}
        for i, j in np.argwhere(coupling[:, :, k]).tolist():
            for features, coefficient in lower[i].items():
                key = tuple(sorted((*features, j)))
                sums[key] = sums.get(key, 0.0) + coefficient * float(coupling[i, j, k])
        higher.append(sums)
    power = (0,) * (coupling.shape[2] // 2)  # the only product of features that is not zero at (1, 0, 0)
    size = math.sqrt(sum(polynomial.get(power, 0.0) ** 2 for polynomial in higher))
    return [
        {features: c / size for features, c in polynomial.items() if abs(c) > _ROUNDING * size} for polynomial in higher
    ]

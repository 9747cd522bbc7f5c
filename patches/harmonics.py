"""Spherical harmonics of edges as polynomials, which they are: one kernel in place of some hundred small operators."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import torch
from eqaccel.patches.replacement import Replacement
from torch import Tensor

from eqaccel.errors import PatchError
from eqaccel.families.polynomial import MAX_POWER, PolynomialSpec, Term
from eqaccel.ops import Polynomial
from eqaccel.roots import add, root
from eqaccel.wigner import wigner_3j_squares

_Squares = dict[tuple[int, ...], Fraction]
"""A polynomial: signed squares of coefficients, as of `eqaccel.roots`, by the features that a term multiplies."""


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

    Those of degree l + 1 are those of degree l coupled with the vector. Coefficients are rounded once; only the area of
    the sphere, whose root is irrational, divides them afterwards.
    """
    of_degree: list[list[_Squares]] = [[{(): Fraction(1)}]]
    for degree in range(max(harmonics._ls_list)):
        of_degree.append(_couple(of_degree[-1], wigner_3j_squares(degree, 1, degree + 1)))
    terms, output = [], 0
    for degree in harmonics._ls_list:
        size = 2 * degree + 1
        norms = {"norm": (1, 1.0), "component": (size, 1.0), "integral": (size, 4 * math.pi)}
        norm, area = norms[harmonics.normalization]
        for polynomial in of_degree[degree]:
            terms += [Term(output, 0, f, root(norm * square) / math.sqrt(area)) for f, square in polynomial.items()]
            output += 1
    return PolynomialSpec(3, 1, output, tuple(terms))


def _couple(lower: list[_Squares], coupling: Mapping[tuple[int, int, int], Fraction]) -> list[_Squares]:
    """Polynomials of the next degree, whose squares add up to one on the sphere."""
    higher: list[_Squares] = [{} for _ in range(len(lower) + 2)]
    for (i, j, k), factor in coupling.items():
        for features, square in lower[i].items():
            key = tuple(sorted((*features, j)))
            higher[k][key] = add(higher[k].get(key, Fraction(0)), factor * square)
    power = (0,) * (len(lower) // 2 + 1)  # the only product of features that is not zero at (1, 0, 0)
    size = sum(abs(polynomial.get(power, 0)) for polynomial in higher)
    return [{features: square / size for features, square in p.items() if square} for p in higher]

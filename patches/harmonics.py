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
    """An `e3nn.o3.SphericalHarmonics` of degree nine at most."""

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


class HighHarmonics(torch.nn.Module):
    """Spherical harmonics of degrees up to nine: polynomials in those of degrees one to three, which are such too.

    Args:
        degrees: Of the outputs, in order.
        normalization: That of e3nn's harmonics.
    """

    def __init__(self, degrees: list[int], normalization: str) -> None:
        super().__init__()
        self.lower = Polynomial(_harmonics(list(range(1, MAX_POWER + 1)), "norm"))
        self.higher = Polynomial(_harmonics_of_harmonics(degrees, normalization))
        self.num_outputs = self.higher.num_outputs

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        """The harmonics (rows, num_outputs) of `x` (rows, 3), times `w` (rows, 1), which are ones."""
        return self.higher(self.lower(x, w), w)


def harmonics_polynomial(harmonics: Any) -> Polynomial | HighHarmonics:
    """The polynomials of a `SphericalHarmonics`.

    Raises:
        PatchError: If it has degrees above nine.
    """
    if harmonics._lmax > MAX_POWER**2:
        raise PatchError(f"no kernel for spherical harmonics of degree {harmonics._lmax}, above {MAX_POWER**2}")
    if harmonics._lmax > MAX_POWER:
        return HighHarmonics(harmonics._ls_list, harmonics.normalization)
    return Polynomial(_harmonics(harmonics._ls_list, harmonics.normalization))


def _harmonics(degrees: list[int], normalization: str) -> PolynomialSpec:
    """The polynomials of some degrees, in closed form: the same bits on every machine.

    Those of degree l + 1 are those of degree l coupled with the vector. Coefficients are rounded once; only the area of
    the sphere, whose root is irrational, divides them afterwards.
    """
    of_degree: list[list[_Squares]] = [[{(): Fraction(1)}]]
    for degree in range(max(degrees)):
        of_degree.append(_couple(of_degree[-1], wigner_3j_squares(degree, 1, degree + 1)))
    terms, output = [], 0
    for degree in degrees:
        norm, area = _norm(degree, normalization)
        for polynomial in of_degree[degree]:
            terms += [Term(output, 0, f, root(norm * square) / math.sqrt(area)) for f, square in polynomial.items()]
            output += 1
    return PolynomialSpec(3, 1, output, tuple(terms))


def _norm(degree: int, normalization: str) -> tuple[int, float]:
    """The squares of components of a degree add up to the first number over the second."""
    size = 2 * degree + 1
    return {"norm": (1, 1.0), "component": (size, 1.0), "integral": (size, 4 * math.pi)}[normalization]


def _harmonics_of_harmonics(degrees: list[int], normalization: str) -> PolynomialSpec:
    """Harmonics as polynomials in those of degrees one to three, whose squares add up to one.

    A degree is the sum of at most three such degrees, the highest ones that are, coupled one after the other. On the
    axis that the middle component belongs to, all others are zero and it is one, which gives factor and sign.
    """
    terms, output = [], 0
    for degree in degrees:
        parts = [MAX_POWER] * (degree // MAX_POWER) + [degree % MAX_POWER] * (degree % MAX_POWER > 0)
        polynomials: list[dict[tuple[int, ...], float]] = [{(): 1.0}]
        total = 0
        for part in parts:
            coupled: list[dict[tuple[int, ...], float]] = [{} for _ in range(2 * (total + part) + 1)]
            coupling = wigner_3j_squares(total, part, total + part)
            axis = root(coupling[total, part, total + part])
            for (i, j, k), square in coupling.items():
                for features, coefficient in polynomials[i].items():
                    key = tuple(sorted((*features, part**2 - 1 + j)))
                    coupled[k][key] = coupled[k].get(key, 0.0) + root(square) / axis * coefficient
            polynomials, total = coupled, total + part
        norm, area = _norm(degree, normalization)
        for polynomial in polynomials:
            terms += [Term(output, 0, f, math.sqrt(norm / area) * c) for f, c in polynomial.items()]
            output += 1
    return PolynomialSpec((MAX_POWER + 1) ** 2 - 1, 1, output, tuple(terms))


def _couple(lower: list[_Squares], coupling: Mapping[tuple[int, int, int], Fraction]) -> list[_Squares]:
    """Polynomials of the next degree, whose squares add up to one on the sphere."""
    higher: list[_Squares] = [{} for _ in range(len(lower) + 2)]
    for (i, j, k), factor in coupling.items():
        for features, square in lower[i].items():
            key = tuple(sorted((*features, j)))
            higher[k][key] = add(higher[k].get(key, Fraction(0)), factor * square)
    power = (0,) * (len(lower) // 2 + 1)  # the only product of features that is not zero at (1, 0, 0)
    size = sum(abs(polynomial.get(power, Fraction(0))) for polynomial in higher)
    return [{features: square / size for features, square in p.items() if square} for p in higher]

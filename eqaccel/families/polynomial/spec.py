"""Polynomials in the features of a row, with weights of the row's own: what a symmetric contraction consists of."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from eqaccel.errors import SpecError

MAX_POWER = 3
"""Features that a term may multiply."""


class Term(NamedTuple):
    """One product in a polynomial: coefficient * w[weight] * x[features[0]] * ... is added to z[output]."""

    output: int
    weight: int
    features: tuple[int, ...]
    coefficient: float


@dataclass(frozen=True)
class PolynomialSpec:
    """Polynomials of degree three at most in the features of a row, linear in weights that every row has of its own.

    Args:
        num_features: Columns of x.
        num_weights: Columns of w.
        num_outputs: Columns of z.
        terms: The products; several with the same factors are added up.

    Raises:
        SpecError: If there is no term, or one with an index outside of these ranges, with more than three features, or
            with a coefficient that is not finite.
    """

    num_features: int
    num_weights: int
    num_outputs: int
    terms: tuple[Term, ...]

    def __post_init__(self) -> None:
        sums: dict[tuple[int, int, tuple[int, ...]], float] = {}
        for number, (output, weight, features, coefficient) in enumerate(self.terms):
            self._check(number, output, weight, features, coefficient)
            key = (tuple(sorted(features)), output, weight)
            sums[key] = sums.get(key, 0.0) + float(coefficient)
        if not sums:
            raise SpecError("terms: expected at least one, got none: there is nothing to compute")
        terms = tuple(Term(output, weight, features, c) for (features, output, weight), c in sorted(sums.items()))
        object.__setattr__(self, "terms", terms)

    def _check(self, number: int, output: int, weight: int, features: tuple[int, ...], coefficient: float) -> None:
        if len(features) > MAX_POWER:
            raise SpecError(f"terms[{number}].features: expected {MAX_POWER} of them at most, got {features}")
        indices = [("output", output, self.num_outputs), ("weight", weight, self.num_weights)]
        indices += [("features", feature, self.num_features) for feature in features]
        for name, index, count in indices:
            if not 0 <= index < count:
                raise SpecError(f"terms[{number}].{name}: expected 0 to {count - 1}, got {index}")
        if not math.isfinite(coefficient):
            raise SpecError(f"terms[{number}].coefficient: expected a finite number, got {coefficient}")

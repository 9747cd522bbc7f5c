"""Polynomials in the features of a row, with weights of the row's own: what a symmetric contraction consists of."""

from __future__ import annotations

import math
import re
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
        sums: dict[tuple[tuple[int, ...], int, int], float] = {}
        for number, (output, weight, features, coefficient) in enumerate(self.terms):
            self._check(number, output, weight, features, coefficient)
            key = (tuple(sorted(features)), output, weight)
            sums[key] = sums.get(key, 0.0) + float(coefficient)
        if not sums:
            raise SpecError("terms: expected at least one, got none: there is nothing to compute")
        terms = tuple(Term(output, weight, features, c) for (features, output, weight), c in sorted(sums.items()))
        object.__setattr__(self, "terms", terms)

    @classmethod
    def of_terms(cls, terms: tuple[Term, ...]) -> PolynomialSpec:
        """The polynomials of these terms, with as many columns as their indices need.

        Raises:
            SpecError: As for the class.
        """
        columns = [[f for t in terms for f in t.features], [t.weight for t in terms], [t.output for t in terms]]
        num_features, num_weights, num_outputs = (1 + max(indices, default=-1) for indices in columns)
        return cls(num_features, num_weights, num_outputs, terms)

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


_TERM = re.compile(r"z(\d+)=([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)w(\d+)((?:x\d+)*)")


def read_terms(text: str) -> tuple[Term, ...]:
    """Reads terms as in "z0 = 0.5 w0 x0 x1; z1 = -2 w1", each of which is added to its output.

    Raises:
        SpecError: If a term is written otherwise.
    """
    return tuple(_read_term(part) for part in text.split(";") if part.strip())


def _read_term(text: str) -> Term:
    found = _TERM.fullmatch("".join(text.split()))
    if not found:
        raise SpecError(f"terms: expected terms such as 'z0 = 0.5 w0 x0 x1', got {text.strip()!r}")
    output, coefficient, weight, factors = found.groups()
    features = tuple(int(feature) for feature in factors.split("x")[1:])
    return Term(int(output), int(weight), features, float(coefficient))

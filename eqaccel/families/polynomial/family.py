"""The family of polynomials in the features of a row."""

from __future__ import annotations

from typing import Any, ClassVar

from eqaccel.codegen import Direction, Result
from eqaccel.families.family import KernelFamily, TunedKernel
from eqaccel.families.polynomial.body import print_polynomial
from eqaccel.families.polynomial.payload import NAME, explain, polynomial_payload, polynomial_prelude
from eqaccel.families.polynomial.reference import execute_polynomial
from eqaccel.families.polynomial.spec import PolynomialSpec, read_terms
from eqaccel.families.words import Word
from eqaccel.targets import Target


class _Polynomials(KernelFamily):
    name = NAME
    words = (Word("terms", read_terms),)
    examples: ClassVar = {"quadratic": ("z0 = 0.5 w0 x0 x0; z0 = -1.5 w1 x1 x1; z1 = 0.25 w2 x0 x1 x1",)}

    def make_spec(self, **arguments: Any) -> PolynomialSpec:
        return PolynomialSpec.of_terms(**arguments)

    def payload(self, spec: PolynomialSpec, tuned: tuple[TunedKernel, ...] = ()) -> tuple[bytes, int]:
        return polynomial_payload(spec)

    def prelude(self, backend: str) -> str:
        return polynomial_prelude(backend)

    def body(
        self, spec: PolynomialSpec, direction: Direction, target: Target, scalar_bytes: int, tuning: Any = None
    ) -> str:
        return print_polynomial(spec, direction)  # for all machines and scalars

    def explain(self, spec: PolynomialSpec, direction: Direction, target: Target, scalar_bytes: int) -> str:
        return explain(spec, direction)

    def reference(
        self, spec: PolynomialSpec, direction: Direction, *, absolute: bool = False, **operands: Any
    ) -> Result:
        return execute_polynomial(spec, direction, absolute=absolute, **operands)


POLYNOMIAL: KernelFamily = _Polynomials()

"""The family of polynomials in the features of a row."""

from __future__ import annotations

from typing import Any

from eqaccel.codegen import Direction, Result
from eqaccel.families.family import KernelFamily, TunedKernel
from eqaccel.families.polynomial.body import print_polynomial
from eqaccel.families.polynomial.payload import NAME, explain, polynomial_payload, polynomial_prelude
from eqaccel.families.polynomial.reference import execute_polynomial
from eqaccel.families.polynomial.spec import PolynomialSpec
from eqaccel.targets import Target


class _Polynomials(KernelFamily):
    name = NAME

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

"""Polynomials in the features of a row, with weights of the row's own: straight-line code for a row."""

from eqaccel.families.polynomial.family import POLYNOMIAL
from eqaccel.families.polynomial.payload import polynomial_payload
from eqaccel.families.polynomial.reference import execute_polynomial
from eqaccel.families.polynomial.spec import MAX_POWER, PolynomialSpec, Term

__all__ = ["MAX_POWER", "POLYNOMIAL", "PolynomialSpec", "Term", "execute_polynomial", "polynomial_payload"]

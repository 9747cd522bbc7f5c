"""Wigner 3j symbols in e3nn's real basis: signs and roots of rational numbers, rounded once.

Sources: the complex Clebsch-Gordan coefficients by Racah's single sum (G. Racah, Phys. Rev. 62, 438 (1942)), written
with binomial coefficients; the basis, phase and norm of `e3nn.o3.wigner_3j`.

Versions of e3nn differ in the sign of some couplings of odd l1+l2+l3, such as (1, 2, 2), those that make pseudo-vectors
and the like: e3nn 0.5 replaced stored tensors by a formula. `WignerConvention` names the two sets of signs.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from enum import Enum
from fractions import Fraction
from functools import cache, lru_cache
from itertools import product
from math import comb

import numpy as np
from numpy.typing import NDArray

from eqaccel.errors import IrrepsError, SpecError
from eqaccel.roots import root, square_of

# The products of three binomials below stay within 2**(l1+l2+l3), which has to fit 64-bit integers.
_MAX_DEGREE_SUM = 62
_MAX_DEGREE_E3NN_04 = 11

# The couplings, in any order of the degrees, whose tensor in e3nn 0.4 has the opposite sign: its stored ones, compared.
_TURNED = frozenset(
    {
        *((1, n, n) for n in range(2, 12)),
        *((3, n, n + 2) for n in range(4, 10)),
        *((4, n, n + 1) for n in range(4, 11)),
        *((5, n, n) for n in range(5, 12)),
        *((5, n, n + 4) for n in (6, 7)),
        *((6, n, n + 3) for n in (6, 7, 8)),
        *((7, n, n + 2) for n in (7, 8, 9)),
        *((8, n, n + 1) for n in (8, 9, 10)),
        *((9, n, n) for n in (9, 10, 11)),
    }
)


class WignerConvention(Enum):
    """Whose signs coupling tensors have. Only couplings of odd l1+l2+l3 depend on it, and of these not all."""

    E3NN_0_4 = "e3nn<0.5"
    E3NN_0_5 = "e3nn>=0.5"

    def __str__(self) -> str:
        return self.value

    @classmethod
    def parse(cls, value: WignerConvention | str) -> WignerConvention:
        """Reads a convention from its text.

        Raises:
            SpecError: If it is none.
        """
        try:
            return cls(value)
        except ValueError:
            expected = " or ".join(repr(option.value) for option in cls)
            raise SpecError(f"convention: expected {expected}, got {value!r}") from None

    @classmethod
    def installed(cls) -> WignerConvention | None:
        """The convention of the e3nn that is imported or else installed; None if there is none."""
        version = getattr(sys.modules.get("e3nn"), "__version__", None)
        if version is None:
            try:
                version = importlib.metadata.version("e3nn")
            except importlib.metadata.PackageNotFoundError:
                return None
        number = re.match(r"(\d+)\.(\d+)", version)
        if number is None:
            return None
        return cls.E3NN_0_4 if tuple(map(int, number.groups())) < (0, 5) else cls.E3NN_0_5


def depends_on_convention(l1: int, l2: int, l3: int) -> bool:
    """Whether the two conventions differ in the sign of a coupling."""
    return tuple(sorted((l1, l2, l3))) in _TURNED


def wigner_sign(l1: int, l2: int, l3: int, convention: WignerConvention | None) -> int:
    """The sign, 1 or -1, of a coupling tensor of a convention relative to that of e3nn 0.5 and later.

    Args:
        l1: First degree.
        l2: Second degree.
        l3: Third degree.
        convention: The convention, or None if it is not known.

    Raises:
        SpecError: If the coupling depends on the convention, and that is not known.
        IrrepsError: If the convention does not define the coupling.
    """
    if convention is WignerConvention.E3NN_0_4 and max(l1, l2, l3) > _MAX_DEGREE_E3NN_04 and (l1 + l2 + l3) % 2:
        raise IrrepsError(
            f"convention: expected 'e3nn>=0.5' for the coupling ({l1}, {l2}, {l3}), got 'e3nn<0.5', whose degrees end "
            f"at {_MAX_DEGREE_E3NN_04}"
        )
    if not depends_on_convention(l1, l2, l3):
        return 1
    if convention is None:
        raise SpecError(
            f"convention: expected 'e3nn<0.5' or 'e3nn>=0.5', as the coupling ({l1}, {l2}, {l3}) has opposite signs in "
            f"them, got none, and there is no installed e3nn to tell: pass the one that the weights were trained with"
        )
    return -1 if convention is WignerConvention.E3NN_0_4 else 1


def wigner_3j(l1: int, l2: int, l3: int, convention: WignerConvention | str | None = None) -> NDArray[np.float64]:
    """The tensor that couples degrees l1 and l2 to l3, the same for all rotations.

    Args:
        l1: First degree.
        l2: Second degree.
        l3: Third degree, with abs(l1-l2) <= l3 <= l1+l2.
        convention: Whose sign it has, "e3nn<0.5" or "e3nn>=0.5"; None for that of the e3nn that is installed. Only
            some couplings of odd l1+l2+l3 depend on it.

    Returns:
        Array of shape (2*l1+1, 2*l2+1, 2*l3+1), float64, read-only and cached, of Frobenius norm 1. The components
        run over the real spherical harmonics, m = -l..l, as in e3nn (for l = 1: y, z, x), and so do the signs. Each
        entry is the float64 nearest to the exact value.

    Raises:
        IrrepsError: If the degrees are not integers >= 0 that satisfy the triangle rule, or their sum exceeds 62, or
            the convention does not define them.
        SpecError: If the convention is none of the two; or if the coupling depends on it, it is not given, and no e3nn
            is installed.
    """
    degrees = (l1, l2, l3)
    if not all(isinstance(l, (int, np.integer)) and l >= 0 for l in degrees):  # noqa: E741
        raise IrrepsError(f"wigner_3j{degrees}: expected three integers >= 0")
    if not abs(l1 - l2) <= l3 <= l1 + l2:
        raise IrrepsError(f"wigner_3j{degrees}: expected abs(l1-l2) <= l3 <= l1+l2 (the triangle rule)")
    if sum(degrees) > _MAX_DEGREE_SUM:
        raise IrrepsError(f"wigner_3j{degrees}: expected degrees of sum <= {_MAX_DEGREE_SUM}")
    if convention is not None:
        convention = WignerConvention.parse(convention)
    elif sum(degrees) % 2:
        convention = WignerConvention.installed()
    return _tensor(*map(int, degrees), wigner_sign(*degrees, convention))


@lru_cache(maxsize=1024)
def scaled_wigner_3j(l1: int, l2: int, l3: int, coefficient: float) -> NDArray[np.float64]:
    """A coefficient times `wigner_3j` in the convention of e3nn 0.5, each product rounded once.

    Args:
        l1: First degree.
        l2: Second degree.
        l3: Third degree; the degrees satisfy the triangle rule.
        coefficient: Any finite number; one that is the root of a simple rational but for rounding counts as that root.

    Returns:
        As `wigner_3j`: float64, read-only and cached. Entries that are equal on paper, or up to sign, are equal bits.
    """
    return _rounded(*_exact(l1, l2, l3), square_of(coefficient))


@cache
def _tensor(l1: int, l2: int, l3: int, sign: int) -> NDArray[np.float64]:
    return _rounded(*_exact(l1, l2, l3), Fraction(sign))


def _rounded(squares: tuple[Fraction, ...], which: NDArray[np.intp], factor: Fraction) -> NDArray[np.float64]:
    tensor = np.array([root(factor * square) for square in squares])[which]
    tensor.flags.writeable = False
    return tensor


def wigner_3j_squares(l1: int, l2: int, l3: int) -> dict[tuple[int, int, int], Fraction]:
    """The exact values of `wigner_3j`, of degrees that satisfy the triangle rule, in the convention of e3nn 0.5.

    Returns:
        The signed square, as of `eqaccel.roots`, of each entry that is not zero.
    """
    squares, which = _exact(l1, l2, l3)
    return {place: squares[n] for place, n in np.ndenumerate(which) if n}


@cache
def _exact(l1: int, l2: int, l3: int) -> tuple[tuple[Fraction, ...], NDArray[np.intp]]:
    """The distinct signed squares of the tensor's entries, zero first, and which of them each entry has.

    An entry for real components is a sum over the complex ones of the same abs(m). With a triple of orders m the triple
    of -m contributes, the same or the opposite, and no other does. So entries are roots as the complex ones are: as
    large if an order is zero, and divided by the root of two if none is.
    """
    sums = _racah_sums(l1, l2, l3)
    j = l1 + l2 - l3
    scale = Fraction(comb(2 * l1, j) * comb(2 * l2, j), (l1 + l2 + l3 + 1) * comb(l1 + l2 + l3, j))
    binomials = [[comb(2 * l, l - m) for m in range(l + 1)] for l in (l1, l2, l3)]  # noqa: E741
    numbers: dict[Fraction, int] = {Fraction(0): 0}
    which = np.zeros((2 * l1 + 1, 2 * l2 + 1, 2 * l3 + 1), dtype=np.intp)
    for m1, m2 in product(range(l1 + 1), range(-l2, l2 + 1)):
        total = int(sums[l1 + m1, l2 + m2])
        m3 = abs(m1 + m2)
        if m3 > l3 or total == 0 or (m1 == 0 and m2 < 0):  # the last are those of -m
            continue
        halves = 2 if m1 and m2 and m3 else 1
        square = total**2 * scale / (halves * binomials[0][m1] * binomials[1][abs(m2)] * binomials[2][m3])
        for a, b, c in product({m1, -m1}, {m2, -m2}, {m3, -m3}):
            turns = _turns(m1, a) + _turns(m2, b) - _turns(m1 + m2, c) - l1 - l2 + l3
            if turns % 2 == 0:  # or else the contributions of m and -m cancel
                signed = square if (total > 0) == (turns % 4 == 0) else -square
                which[l1 + a, l2 + b, l3 + c] = numbers.setdefault(signed, len(numbers))
    which.flags.writeable = False
    return tuple(numbers), which


def _turns(m: int, component: int) -> int:
    """How many times i is in the factor of complex order m in a real component of order +-m, which is 1 for m = 0.

    Components above zero are cosines, those below are sines. e3nn's phase (-i)^l is left out.
    """
    return (2 * m if m > 0 else 0) + (0 if component >= 0 else 1 if m > 0 else -1)


def _racah_sums(l1: int, l2: int, l3: int) -> NDArray[np.int64]:
    """Racah's sums for orders m1 (rows) and m2 (columns).

    Complex Clebsch-Gordan coefficients <l1 m1 l2 m2 | l3 m3> are these, times a positive factor of the degrees, divided
    by the root of binomials (2l, l - m) of all three.
    """
    m1 = np.arange(-l1, l1 + 1)[:, None, None]
    m2 = np.arange(-l2, l2 + 1)[None, :, None]
    j = l1 + l2 - l3
    v = np.arange(j + 1)
    terms = (-1) ** v * _binomial(j, v) * _binomial(2 * l1 - j, l1 - m1 - v) * _binomial(2 * l2 - j, l2 + m2 - v)
    return terms.sum(axis=-1)


def _binomial(n: int, k: NDArray[np.int64]) -> NDArray[np.int64]:
    """The binomials n over k, which is 0 outside of 0 <= k <= n."""
    row = np.array([comb(n, i) for i in range(n + 1)], dtype=np.int64)
    return np.where((k >= 0) & (k <= n), row[np.clip(k, 0, n)], 0)

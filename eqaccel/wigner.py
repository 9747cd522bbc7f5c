"""Wigner 3j symbols in e3nn's real basis, from exact integers.

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
from functools import cache
from math import comb

import numpy as np
from numpy.typing import NDArray

from eqaccel.errors import IrrepsError, SpecError

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
        run over the real spherical harmonics, m = -l..l, as in e3nn (for l = 1: y, z, x), and so do the signs.

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


@cache
def _tensor(l1: int, l2: int, l3: int, sign: int) -> NDArray[np.float64]:
    u1, u2, u3 = map(_complex_from_real, (l1, l2, l3))
    coupling = np.einsum("abc,ai->ibc", _clebsch_gordan(l1, l2, l3), u1)
    coupling = np.einsum("ibc,bj->ijc", coupling, u2)
    # With e3nn's phase (-i)^l in each basis change the tensor is real; the imaginary part is rounding.
    tensor = np.einsum("ijc,ck->ijk", coupling, u3.conj()).real
    tensor /= sign * np.linalg.norm(tensor)
    tensor[np.abs(tensor) < 1e-14] = 0.0
    tensor.flags.writeable = False
    return tensor


def _clebsch_gordan(l1: int, l2: int, l3: int) -> NDArray[np.float64]:
    """Complex Clebsch-Gordan coefficients <l1 m1 l2 m2 | l3 m3> up to a positive factor that depends on l1, l2, l3.

    The alternating sum, where rounding would cancel digits, is done in integers; one square root is rounded at the end.
    """
    m1 = np.arange(-l1, l1 + 1)[:, None, None]
    m2 = np.arange(-l2, l2 + 1)[None, :, None]
    j = l1 + l2 - l3
    v = np.arange(j + 1)
    terms = (-1) ** v * _binomial(j, v) * _binomial(2 * l1 - j, l1 - m1 - v) * _binomial(2 * l2 - j, l2 + m2 - v)

    a, b = np.nonzero(np.abs(m1 + m2)[..., 0] <= l3)
    m1, m2 = a - l1, b - l2
    m3 = m1 + m2
    scale = 1.0 * _binomial(2 * l1, l1 - m1) * _binomial(2 * l2, l2 - m2) * _binomial(2 * l3, l3 - m3)
    out = np.zeros((2 * l1 + 1, 2 * l2 + 1, 2 * l3 + 1))
    out[a, b, m3 + l3] = terms.sum(axis=-1)[a, b] / np.sqrt(scale)
    return out


def _binomial(n: int, k: NDArray[np.int64]) -> NDArray[np.int64]:
    """The binomials n over k, which is 0 outside of 0 <= k <= n."""
    row = np.array([comb(n, i) for i in range(n + 1)], dtype=np.int64)
    return np.where((k >= 0) & (k <= n), row[np.clip(k, 0, n)], 0)


@cache
def _complex_from_real(l: int) -> NDArray[np.complex128]:  # noqa: E741
    """Unitary matrix of the complex spherical harmonics (rows) in the real ones (columns), with e3nn's phase (-i)^l."""
    out = np.zeros((2 * l + 1, 2 * l + 1), dtype=complex)
    out[l, l] = 1.0
    for m in range(1, l + 1):
        out[l - m, [l + m, l - m]] = np.array([1.0, -1.0j]) / np.sqrt(2.0)
        out[l + m, [l + m, l - m]] = (-1) ** m * np.array([1.0, 1.0j]) / np.sqrt(2.0)
    return (-1.0j) ** l * out

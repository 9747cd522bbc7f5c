"""Wigner 3j symbols in e3nn's real basis, from exact integers.

Sources: the complex Clebsch-Gordan coefficients by Racah's single sum (G. Racah, Phys. Rev. 62, 438 (1942)), written
with binomial coefficients; the basis, phase and norm of `e3nn.o3.wigner_3j`.

The signs are those of e3nn 0.5 and later. e3nn 0.4 (which MACE pins) has the opposite sign for some couplings of odd
l1+l2+l3, such as (1, 2, 2): those that make pseudo-vectors and the like. `TensorProductSpec.from_e3nn` takes the sign
from the module it reads, so weights trained with either version keep their meaning.
"""

from __future__ import annotations

from functools import cache, lru_cache
from math import comb

import numpy as np
from numpy.typing import NDArray

from eqaccel.errors import IrrepsError

# The products of three binomials below stay within 2**(l1+l2+l3), which has to fit 64-bit integers.
_MAX_DEGREE_SUM = 62


@lru_cache(maxsize=None, typed=True)  # typed: 1.0 is not a degree, whether or not 1 is cached
def wigner_3j(l1: int, l2: int, l3: int) -> NDArray[np.float64]:
    """The tensor that couples degrees l1 and l2 to l3, the same for all rotations.

    Args:
        l1: First degree.
        l2: Second degree.
        l3: Third degree, with abs(l1-l2) <= l3 <= l1+l2.

    Returns:
        Array of shape (2*l1+1, 2*l2+1, 2*l3+1), float64, read-only and cached, of Frobenius norm 1. The components
        run over the real spherical harmonics, m = -l..l, as in e3nn (for l = 1: y, z, x), and so do the signs.

    Raises:
        IrrepsError: If the degrees are not integers >= 0 that satisfy the triangle rule, or their sum exceeds 62.
    """
    degrees = (l1, l2, l3)
    if not all(isinstance(l, (int, np.integer)) and l >= 0 for l in degrees):  # noqa: E741
        raise IrrepsError(f"wigner_3j{degrees}: expected three integers >= 0")
    if not abs(l1 - l2) <= l3 <= l1 + l2:
        raise IrrepsError(f"wigner_3j{degrees}: expected abs(l1-l2) <= l3 <= l1+l2 (the triangle rule)")
    if sum(degrees) > _MAX_DEGREE_SUM:
        raise IrrepsError(f"wigner_3j{degrees}: expected degrees of sum <= {_MAX_DEGREE_SUM}")

    u1, u2, u3 = map(_complex_from_real, degrees)
    coupling = np.einsum("abc,ai->ibc", _clebsch_gordan(*degrees), u1)
    coupling = np.einsum("ibc,bj->ijc", coupling, u2)
    # With e3nn's phase (-i)^l in each basis change the tensor is real; the imaginary part is rounding.
    tensor = np.einsum("ijc,ck->ijk", coupling, u3.conj()).real
    tensor /= np.linalg.norm(tensor)
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

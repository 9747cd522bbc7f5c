"""Wigner 3j symbols in e3nn's real basis, from exact integers.

Sources: the complex Clebsch-Gordan coefficients by Racah's single sum (G. Racah, Phys. Rev. 62, 438 (1942)), written
with binomial coefficients; the basis, phase and norm of `e3nn.o3.wigner_3j`.
"""

from __future__ import annotations

from functools import lru_cache
from math import comb

import numpy as np
from numpy.typing import NDArray

from eqaccel.errors import IrrepsError

# The products of three binomials below stay within 2**(l1+l2+l3), which has to fit 64-bit integers.
_MAX_DEGREE_SUM = 62


@lru_cache(maxsize=None)
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
    tensor = np.where(np.abs(tensor) > 1e-14, tensor, 0.0)
    tensor /= np.linalg.norm(tensor)
    tensor.flags.writeable = False
    return tensor


@lru_cache(maxsize=None)
def _pascal(size: int) -> NDArray[np.int64]:
    """Binomials, out[n, k + size] = n over k for 0 <= n < size and -size <= k < size (0 outside of 0 <= k <= n)."""
    return np.array([[comb(n, k) if k >= 0 else 0 for k in range(-size, size)] for n in range(size)], dtype=np.int64)


def _clebsch_gordan(l1: int, l2: int, l3: int) -> NDArray[np.float64]:
    """Complex Clebsch-Gordan coefficients <l1 m1 l2 m2 | l3 m3> up to a positive factor that depends on l1, l2, l3.

    The alternating sum, where rounding would cancel digits, is done in integers; one square root is rounded at the end.
    """
    size = 2 * (l1 + l2 + l3) + 2
    binomial, zero = _pascal(size), size
    m1 = np.arange(-l1, l1 + 1)[:, None, None]
    m2 = np.arange(-l2, l2 + 1)[None, :, None]
    j = l1 + l2 - l3
    k = np.arange(j + 1)[None, None, :]
    terms = (-1) ** k * binomial[j, zero + k]
    terms = terms * binomial[2 * l1 - j, zero + l1 - m1 - k] * binomial[2 * l2 - j, zero + l2 + m2 - k]
    total = terms.sum(axis=-1)

    m1, m2 = m1[..., 0], m2[..., 0]
    m3 = m1 + m2
    scale = binomial[2 * l1, zero + l1 - m1].astype(float) * binomial[2 * l2, zero + l2 - m2]
    inside = np.abs(m3) <= l3
    scale = scale * np.where(inside, binomial[2 * l3, zero + l3 - m3], 1)

    out = np.zeros((2 * l1 + 1, 2 * l2 + 1, 2 * l3 + 1))
    i, k = np.nonzero(inside)
    out[i, k, m3[i, k] + l3] = (total / np.sqrt(scale))[i, k]
    return out


@lru_cache(maxsize=None)
def _complex_from_real(l: int) -> NDArray[np.complex128]:  # noqa: E741
    """Unitary matrix of the complex spherical harmonics (rows) in the real ones (columns), with e3nn's phase (-i)^l."""
    out = np.zeros((2 * l + 1, 2 * l + 1), dtype=complex)
    out[l, l] = 1.0
    for m in range(1, l + 1):
        out[l - m, [l + m, l - m]] = np.array([1.0, -1.0j]) / np.sqrt(2.0)
        out[l + m, [l + m, l - m]] = (-1) ** m * np.array([1.0, 1.0j]) / np.sqrt(2.0)
    return (-1.0j) ** l * out

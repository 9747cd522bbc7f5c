"""The reference executor of radial basis functions, in NumPy: what the kernels of every backend have to compute."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eqaccel.codegen import Direction, Result
from eqaccel.families.radial_basis.spec import RadialBasisSpec

_SERIES_BELOW = 1.5  # of k r: terms of derivatives cancel there
_SERIES_TERMS = 14  # what is left out is below 1.5^28 / 28!, far less than rounding


class _Function(NamedTuple):
    """Values of functions, and their derivatives by the length r, by the frequency k, and by both."""

    value: NDArray
    r: NDArray
    rr: NDArray
    k: NDArray
    rk: NDArray
    kk: NDArray


def execute_radial_basis(
    spec: RadialBasisSpec,
    direction: Direction,
    x: NDArray,
    w: NDArray,
    *,
    gz: NDArray | None = None,
    a: NDArray | None = None,
    c: NDArray | None = None,
    absolute: bool = False,
) -> Result:
    """Runs a direction of radial basis functions.

    Args:
        spec: The functions.
        direction: What to compute.
        x: (rows, 1), lengths.
        w: (rows, num_basis), frequencies; or (num_basis,), the same for all rows.
        gz: (rows, num_outputs), for backward and double backward.
        a: Tangent of x, for double backward; c likewise for w, of one row for each of x.
        c: Tangent of w.
        absolute: Add up the absolute values of all terms instead: what rounding errors are proportional to.

    Returns:
        Forward: z. Backward: gx and gw, the gradients of <gz, z>; gw has a row for each of x. Double backward: z, gx
        and gw, the gradients of <a, gx> + <c, gw> with respect to gz, x and w.
    """
    w = spec.unit * np.broadcast_to(w, (len(x), spec.num_basis))
    unit = abs(spec.unit) if absolute else spec.unit
    if absolute:
        gz, a, c = (None if v is None else np.abs(v) for v in (gz, a, c))
    f = _functions(spec, x, w, absolute)
    if direction is Direction.FORWARD:
        return Result(z=f.value)
    assert gz is not None
    if direction is Direction.BACKWARD:
        return Result(gx=(gz * f.r).sum(1, keepdims=True), gw=(unit * gz * f.k)[:, : spec.num_basis])
    assert a is not None
    assert c is not None
    c = unit * c if spec.num_basis else np.zeros_like(f.k)
    return Result(
        z=a * f.r + c * f.k,
        gx=(gz * (a * f.rr + c * f.rk)).sum(1, keepdims=True),
        gw=(unit * gz * (a * f.rk + c * f.kk))[:, : spec.num_basis],
    )


def _functions(spec: RadialBasisSpec, r: NDArray, k: NDArray, absolute: bool) -> _Function:
    """The functions with their cutoff and factor."""
    inside = r < spec.r_max if spec.power else np.full(r.shape, True)
    s = _waves(np.where(inside, r, 1.0), k, absolute) if spec.num_basis else _Function(np.ones_like(r), *[0 * r] * 5)
    u, u_r, u_rr = (np.where(inside, part, 0.0) for part in _cutoff(spec, r, absolute))
    combined = (
        s.value * u,
        s.r * u + s.value * u_r,
        s.rr * u + 2 * s.r * u_r + s.value * u_rr,
        s.k * u,
        s.rk * u + s.k * u_r,
        s.kk * u,
    )
    factor = abs(spec.factor) if absolute else spec.factor
    return _Function(*(factor * part for part in combined))


def _waves(r: NDArray, k: NDArray, absolute: bool) -> _Function:
    """sin(k r) / r; below an angle where the terms of its derivatives cancel by their series."""
    angle = k * r
    near = np.abs(angle) < _SERIES_BELOW
    far = np.where(near, _SERIES_BELOW, angle)
    sine, cosine = np.sin(far), np.cos(far)
    terms = [[sine / far], [cosine / far, -sine / far**2], [-sine / far, -2 * cosine / far**2, 2 * sine / far**3]]
    parts = [np.abs(part).sum(0) if absolute else sum(part) for part in map(np.asarray, terms)]
    small = np.where(near, angle, 0.0)
    series = [np.zeros_like(angle) for _ in range(3)]
    factorial = 1.0
    for j in range(_SERIES_TERMS):
        n = 2 * j
        factorial *= max(n * (n + 1), 1)
        for order, scale in enumerate((1, n, n * (n - 1))):
            if scale:
                term = (-1) ** j * scale / factorial * small ** (n - order)
                series[order] += np.abs(term) if absolute else term
    h, h_r, h_rr = (np.where(near, low, high) for low, high in zip(series, parts, strict=True))
    sine, cosine = np.sin(angle), np.cos(angle)
    # A cosine near its zero is as wrong as one of size one.
    by_k = (np.ones_like(sine), np.abs(k), np.abs(r) * np.abs(sine)) if absolute else (cosine, -k * sine, -r * sine)
    size = np.abs(k) if absolute else k
    return _Function(size * h, size**2 * h_r, size**3 * h_rr, by_k[0], by_k[1], by_k[2])


def _cutoff(spec: RadialBasisSpec, r: NDArray, absolute: bool) -> tuple[NDArray, NDArray, NDArray]:
    """The cutoff and its derivatives, as sums whose terms have one sign between zero and the cutoff."""
    p, one = spec.power, np.ones_like(r)
    if p == 0:
        return one, 0 * one, 0 * one
    x, left = r / spec.r_max, (spec.r_max - r) / spec.r_max
    power = np.abs(x) if absolute else x
    u = left**3 * sum((j + 1) * (j + 2) / 2 * power**j for j in range(p))
    steep = -p * (p + 1) * (p + 2) / 2 * left / spec.r_max
    if absolute:
        return (
            np.abs(u),
            np.abs(steep * x ** (p - 1) * left),
            np.abs(steep * x ** (p - 2)) * ((p - 1) * np.abs(left) + 2 * np.abs(x)) / spec.r_max,
        )
    return u, steep * x ** (p - 1) * left, steep * x ** (p - 2) * ((p - 1) * left - 2 * x) / spec.r_max

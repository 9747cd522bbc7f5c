"""The reference executor of polynomials, in NumPy: what the kernels of every backend have to compute.

A term is a product of four factors, three features and a weight, where one stands for a feature that is not there. So
its derivatives are sums of products of the other factors.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eqaccel.codegen import Direction, Result
from eqaccel.families.polynomial.spec import MAX_POWER, PolynomialSpec


def execute_polynomial(
    spec: PolynomialSpec,
    direction: Direction,
    x: NDArray,
    w: NDArray,
    *,
    gz: NDArray | None = None,
    a: NDArray | None = None,
    c: NDArray | None = None,
    absolute: bool = False,
) -> Result:
    """Runs a direction of a polynomial.

    Args:
        spec: The polynomial.
        direction: What to compute.
        x: (rows, num_features).
        w: (rows, num_weights).
        gz: (rows, num_outputs), for backward and double backward.
        a: Tangent of x, for double backward; c likewise for w.
        c: Tangent of w.
        absolute: Add up the absolute values of all terms instead: what rounding errors are proportional to.

    Returns:
        Forward: z. Backward: gx and gw, the gradients of <gz, z>. Double backward: z, gx and gw, the gradients of
        <a, gx> + <c, gw> with respect to gz, x and w.
    """
    coefficients = np.array([term.coefficient for term in spec.terms])
    if absolute:
        coefficients, x, w = np.abs(coefficients), np.abs(x), np.abs(w)
        gz, a, c = (None if v is None else np.abs(v) for v in (gz, a, c))
    padding = (spec.num_features,) * MAX_POWER
    columns = np.array([(*(term.features + padding)[:MAX_POWER], term.weight) for term in spec.terms])
    outputs = np.array([term.output for term in spec.terms])

    def factors(of_x: NDArray, of_w: NDArray, absent: float) -> list[NDArray]:
        padded = np.pad(of_x, ((0, 0), (0, 1)), constant_values=absent)
        return [padded[:, columns[:, n]] for n in range(MAX_POWER)] + [of_w[:, columns[:, MAX_POWER]]]

    values = factors(x, w, 1.0)

    def product(*left_out: int) -> NDArray:
        chosen = [coefficients, *(value for n, value in enumerate(values) if n not in left_out)]
        return np.prod(np.broadcast_arrays(*chosen), axis=0)

    def collect(of_terms: NDArray, where: NDArray, count: int) -> NDArray:
        sums = np.zeros((count + 1, len(of_terms)))
        np.add.at(sums, where, of_terms.T)
        return sums[:count].T

    def by_factor(gradients: list[NDArray]) -> tuple[NDArray, NDArray]:
        of_x = [collect(gradients[n], columns[:, n], spec.num_features) for n in range(MAX_POWER)]
        return np.asarray(sum(of_x)), collect(gradients[MAX_POWER], columns[:, MAX_POWER], spec.num_weights)

    numbers = range(MAX_POWER + 1)
    if direction is Direction.FORWARD:
        return Result(z=collect(product(), outputs, spec.num_outputs))
    assert gz is not None
    of_outputs = gz[:, outputs]
    if direction is Direction.BACKWARD:
        gx, gw = by_factor([of_outputs * product(n) for n in numbers])
        return Result(gx=gx, gw=gw)
    assert a is not None
    assert c is not None
    tangents = factors(a, c, 0.0)
    z = collect(sum(tangents[n] * product(n) for n in numbers), outputs, spec.num_outputs)
    gradients = [of_outputs * sum(tangents[m] * product(n, m) for m in numbers if m != n) for n in numbers]
    gx, gw = by_factor(gradients)
    return Result(z=z, gx=gx, gw=gw)

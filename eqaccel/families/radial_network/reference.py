"""The reference executor of radial networks, in NumPy: what the kernels have to compute."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eqaccel.codegen import Direction, Result
from eqaccel.codegen.activations import logistic
from eqaccel.families.radial_network.spec import RadialNetworkSpec


def execute_radial_network(
    spec: RadialNetworkSpec,
    direction: Direction,
    x: NDArray,
    w: NDArray,
    *,
    gz: NDArray | None = None,
    absolute: bool = False,
) -> Result:
    """Runs a direction of a radial network.

    Args:
        spec: The network.
        direction: Forward or backward.
        x: (rows, spec.widths[0]).
        w: (spec.num_weights,), the weights of one layer after the other, each (inputs, outputs) by rows.
        gz: (rows, spec.widths[-1]), gradient of the output, for backward.
        absolute: Give what rounding errors are proportional to instead. A layer makes relative errors of its sums as
            large as those of what it is given, and adds its own: errors of z are at most a count of roundings times it.

    Returns:
        Forward: z. Backward: gx, the gradient of <gz, z>.
    """
    slopes, matrices = [], _matrices(spec, w)
    z, size = x, np.abs(x)
    for matrix, factor, scale in zip(matrices, spec.factors, spec.scales, strict=True):
        y, total = scale * (z @ matrix), abs(scale) * (size @ np.abs(matrix))
        s, rest = logistic(y)
        slope = s * (1 + y * rest)
        # SiLU has slopes up to 1.1, which change by at most half of what their arguments are off by.
        slopes.append(factor * scale * slope if not absolute else abs(factor * scale) * (np.abs(slope) + total))
        z, size = factor * y * s, abs(factor) * 1.1 * total
    if direction is Direction.FORWARD:
        return Result(z=size if absolute else z)
    assert gz is not None
    g = np.abs(gz) if absolute else gz
    for matrix, slope in zip(reversed(matrices), reversed(slopes), strict=True):
        g = (g * slope) @ (np.abs(matrix) if absolute else matrix).T
    return Result(gx=g)


def _matrices(spec: RadialNetworkSpec, w: NDArray) -> list[NDArray]:
    parts = np.split(w, np.cumsum(spec.sizes)[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, spec.shapes, strict=True)]

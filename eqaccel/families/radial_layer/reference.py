"""The reference executor of radial layers, in NumPy: what the kernels of every backend have to compute."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eqaccel.codegen import Direction, Result
from eqaccel.codegen.activations import logistic
from eqaccel.families.radial_layer.spec import RadialLayerSpec


def execute_radial_layer(
    spec: RadialLayerSpec,
    direction: Direction,
    x: NDArray,
    w: NDArray,
    *,
    gz: NDArray | None = None,
    absolute: bool = False,
) -> Result:
    """Runs a direction of a radial layer.

    Args:
        spec: The layer.
        direction: Forward or backward.
        x: (rows, num_inputs).
        w: (num_inputs, num_outputs).
        gz: (rows, num_outputs), gradient of the output, for backward.
        absolute: Add up the absolute values of all terms instead: what rounding errors are proportional to.

    Returns:
        Forward: z. Backward: gx, the gradient of <gz, z>.
    """
    y, size = spec.scale * (x @ w), abs(spec.scale) * (np.abs(x) @ np.abs(w))
    s, rest = logistic(y)
    factor, scale = spec.factor, spec.scale
    if absolute:
        y, factor, scale, w = size, abs(factor), abs(scale), np.abs(w)
        gz = None if gz is None else np.abs(gz)
    if direction is Direction.FORWARD:
        return Result(z=factor * y * s)
    assert gz is not None
    # The slope changes by at most half of what its argument is off by.
    slope = s * (1 + y * rest) + (0.5 * size if absolute else 0)
    return Result(gx=(gz * (factor * scale * slope)) @ w.T)

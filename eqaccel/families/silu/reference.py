"""The reference executor of SiLU, in NumPy: what the kernels of every backend have to compute."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eqaccel.codegen import Direction, Result
from eqaccel.codegen.activations import ACTIVATIONS
from eqaccel.families.silu.spec import SiluSpec


def execute_silu(
    spec: SiluSpec,
    direction: Direction,
    x: NDArray,
    *,
    gz: NDArray | None = None,
    a: NDArray | None = None,
    absolute: bool = False,
) -> Result:
    """Runs a direction of SiLU, element by element.

    Args:
        spec: The factors.
        direction: What to compute.
        x: Elements, of any shape.
        gz: Gradient of the output, for backward and double backward.
        a: Tangent of x, for double backward.
        absolute: Add up the absolute values of all terms instead: what rounding errors are proportional to.

    Returns:
        Forward: z. Backward: gx, the gradient of <gz, z>. Double backward: z and gx, the gradients of <a, gx> with
        respect to gz and x.
    """
    value, slope, curvature = ACTIVATIONS["silu"](spec.scale * x, absolute)
    factor, scale = spec.factor, spec.scale
    if absolute:
        factor, scale = abs(factor), abs(scale)
        gz, a = (None if v is None else np.abs(v) for v in (gz, a))
    if direction is Direction.FORWARD:
        return Result(z=factor * value)
    assert gz is not None
    if direction is Direction.BACKWARD:
        return Result(gx=gz * factor * scale * slope)
    assert a is not None
    return Result(z=a * factor * scale * slope, gx=a * gz * factor * scale**2 * curvature)

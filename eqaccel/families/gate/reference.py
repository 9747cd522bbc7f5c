"""The reference executor of gates, in NumPy: what the kernels of every backend have to compute."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eqaccel.codegen import Direction, Result
from eqaccel.codegen.activations import ACTIVATIONS
from eqaccel.families.gate.spec import GatedChannels, GateSpec


def execute_gate(
    spec: GateSpec,
    direction: Direction,
    x: NDArray,
    *,
    gz: NDArray | None = None,
    a: NDArray | None = None,
    absolute: bool = False,
) -> Result:
    """Runs a direction of a gate.

    Args:
        spec: The gate.
        direction: What to compute.
        x: (rows, num_inputs).
        gz: (rows, num_outputs), gradient of the output, for backward and double backward.
        a: (rows, num_inputs), tangent of x, for double backward.
        absolute: Add up the absolute values of all terms instead: what rounding errors are proportional to.

    Returns:
        Forward: z. Backward: gx, the gradient of <gz, z>. Double backward: z and gx, the gradients of <a, gx> with
        respect to gz and x.
    """
    sized = np.abs if absolute else np.asarray
    z, gx = np.zeros((len(x), spec.num_outputs), x.dtype), np.zeros_like(x)
    end = 0
    for part in spec.parts:
        at, out = slice(part.first, part.first + part.mul), slice(end, end + part.num_outputs)
        end = out.stop
        kind, factor = part.activation
        f, slope, curvature = (sized(factor) * values[..., None] for values in ACTIVATIONS[kind](x[:, at], absolute))
        gated = isinstance(part, GatedChannels)
        channels = slice(part.column, part.column + part.num_outputs)
        shape = (len(x), part.mul, part.num_outputs // part.mul)
        xs = sized(x[:, channels]).reshape(shape) if gated else np.ones(shape, x.dtype)
        # z = f(g) xs, where the xs of scalars are ones, which have no gradient.
        if direction is Direction.FORWARD:
            z[:, out] = (f * xs).reshape(len(x), part.num_outputs)
            continue
        assert gz is not None
        g = sized(gz[:, out]).reshape(xs.shape)
        if direction is Direction.BACKWARD:
            if gated:
                gx[:, channels] = (g * f).reshape(len(x), part.num_outputs)
            gx[:, at] = (g * xs * slope).sum(-1)
            continue
        assert a is not None
        along = sized(a[:, at])[..., None]
        of_xs = sized(a[:, channels]).reshape(xs.shape) if gated else np.zeros_like(xs)
        z[:, out] = (of_xs * f + along * slope * xs).reshape(len(x), part.num_outputs)
        if gated:
            gx[:, channels] = (along * slope * g).reshape(len(x), part.num_outputs)
        gx[:, at] = (of_xs * g * slope + along * curvature * g * xs).sum(-1)
    return Result(z=None if direction is Direction.BACKWARD else z, gx=None if direction is Direction.FORWARD else gx)

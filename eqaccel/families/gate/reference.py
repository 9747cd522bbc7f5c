"""The reference executor of gates, in NumPy: what the kernels of every backend have to compute."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from eqaccel.codegen import Direction, Result
from eqaccel.families.gate.spec import GatedChannels, GateSpec

Curve = tuple[NDArray, NDArray, NDArray]
"""A function, its slope and its curvature; or, of each, the sum of the absolute values of its terms."""


def _logistic(x: NDArray) -> tuple[NDArray, NDArray]:
    """The logistic functions of x and of -x."""
    decay = np.exp(-np.abs(x))
    large, small = 1 / (1 + decay), decay / (1 + decay)
    return np.where(x >= 0, large, small), np.where(x >= 0, small, large)


def _silu(x: NDArray, absolute: bool) -> Curve:
    s, rest = _logistic(x)
    y, difference = (np.abs(x), rest + s) if absolute else (x, rest - s)
    return y * s, s * (1 + y * rest), s * rest * (2 + y * difference)


def _sigmoid(x: NDArray, absolute: bool) -> Curve:
    s, rest = _logistic(x)
    return s, s * rest, s * rest * (rest + s if absolute else rest - s)


def _tanh(x: NDArray, absolute: bool) -> Curve:
    s, rest = _logistic(2 * x)
    value = np.tanh(np.abs(x)) if absolute else np.tanh(x)
    return value, 4 * s * rest, (8 if absolute else -8) * s * rest * value


def _softplus(x: NDArray, absolute: bool) -> Curve:
    s, rest = _logistic(x)
    line, log_2 = x > 20, np.log(np.asarray(2, x.dtype))  # as torch has it
    value = np.where(line, x, np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))))
    return value + log_2 if absolute else value - log_2, np.where(line, 1, s), np.where(line, 0, s * rest)


def _abs(x: NDArray, absolute: bool) -> Curve:
    return np.abs(x), np.abs(np.sign(x)) if absolute else np.sign(x), np.zeros_like(x)


ACTIVATIONS: dict[str, Callable[[NDArray, bool], Curve]] = {
    "silu": _silu,
    "tanh": _tanh,
    "sigmoid": _sigmoid,
    "ssp": _softplus,
    "abs": _abs,
}
"""Functions by their kinds, with two derivatives; or sums of absolute values, if the second argument says so."""


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

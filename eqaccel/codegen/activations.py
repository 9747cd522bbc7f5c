"""Activations with two derivatives, in NumPy: what the functions of `preludes/activations.h` have to compute."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Curve = tuple[NDArray, NDArray, NDArray]
"""A function, its slope and its curvature; or, of each, the sum of the absolute values of its terms."""


def logistic(x: NDArray) -> tuple[NDArray, NDArray]:
    """The logistic functions of x and of -x."""
    decay = np.exp(-np.abs(x))
    large, small = 1 / (1 + decay), decay / (1 + decay)
    return np.where(x >= 0, large, small), np.where(x >= 0, small, large)


def _silu(x: NDArray, absolute: bool) -> Curve:
    s, rest = logistic(x)
    y, difference = (np.abs(x), rest + s) if absolute else (x, rest - s)
    return y * s, s * (1 + y * rest), s * rest * (2 + y * difference)


def _sigmoid(x: NDArray, absolute: bool) -> Curve:
    s, rest = logistic(x)
    return s, s * rest, s * rest * (rest + s if absolute else rest - s)


def _tanh(x: NDArray, absolute: bool) -> Curve:
    s, rest = logistic(2 * x)
    value = np.tanh(np.abs(x)) if absolute else np.tanh(x)
    return value, 4 * s * rest, (8 if absolute else -8) * s * rest * value


def _softplus(x: NDArray, absolute: bool) -> Curve:
    s, rest = logistic(x)
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

"""Pairs of channels, and the channels of the output that they become, as arrays of indices."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eqaccel.families.tensor_product.spec import Mixing, Pairs, Path


def channels_of_pairs(path: Path) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The channels u of in1 and v of in2 of each pair, (pairs,) each, in the order of the weights."""
    if path.mode.pairs is Pairs.ALL:
        u, v = np.divmod(np.arange(path.mul1 * path.mul2), path.mul2)
        return u, v
    if path.mode.pairs is Pairs.EQUAL:
        return np.arange(path.mul1), np.arange(path.mul1)
    u, v = np.triu_indices(path.mul1, 1)
    return u, v


def channels_of_output(path: Path) -> NDArray[np.intp]:
    """The channel of the output that each pair is added to, (pairs,); for paths whose pairs no matrix mixes."""
    u, v = channels_of_pairs(path)
    return {Mixing.OWN: np.arange(len(u)), Mixing.OVER_V: u, Mixing.OVER_U: v}[path.mode.mixing]

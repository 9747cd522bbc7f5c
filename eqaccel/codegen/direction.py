"""Which derivative a kernel computes, and what that writes."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np


class Direction(enum.Enum):
    """Which derivative a kernel computes."""

    FORWARD = "forward"
    BACKWARD = "backward"
    DOUBLE_BACKWARD = "double_backward"


OUTPUTS = {
    Direction.FORWARD: ("z",),
    Direction.BACKWARD: ("gx", "gy", "gw"),
    Direction.DOUBLE_BACKWARD: ("z", "gx", "gy", "gw"),
}
"""What each direction writes, in the order of its results."""


@dataclass(frozen=True)
class Result:
    """Outputs of a kernel, as an executor gives them; those that its direction does not have are None.

    Attributes:
        z: (num_receivers, z_dim): the output, or in double backward the gradient with respect to gz.
        gx: (num_senders, x_dim).
        gy: (num_edges, y_dim).
        gw: (num_edges, weight_numel).
    """

    z: np.ndarray | None = None
    gx: np.ndarray | None = None
    gy: np.ndarray | None = None
    gw: np.ndarray | None = None

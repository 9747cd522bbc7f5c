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
    TRIPLE_BACKWARD = "triple_backward"

    @property
    def order(self) -> int:
        """How often the forward direction is differentiated."""
        return tuple(Direction).index(self)

    @property
    def tangents(self) -> int:
        """Rows that an operand of the forward direction has: its own, and those of tangents."""
        return max(self.order, 1)

    @property
    def gradients(self) -> int:
        """Gradients that are written of such an operand and, from double backward on, of its tangents."""
        return {Direction.FORWARD: 0, Direction.TRIPLE_BACKWARD: 2}.get(self, 1)


COMMON = (Direction.FORWARD, Direction.BACKWARD, Direction.DOUBLE_BACKWARD)
"""The directions of a family that has no kernels of third derivatives."""

OUTPUTS = {
    Direction.FORWARD: ("z",),
    Direction.BACKWARD: ("gx", "gy", "gw"),
    Direction.DOUBLE_BACKWARD: ("z", "gx", "gy", "gw"),
    Direction.TRIPLE_BACKWARD: ("z", "gx", "gy", "gw", "ga", "gb", "gc"),
}
"""What each direction writes, in the order of its results."""


@dataclass(frozen=True)
class Result:
    """Outputs of a kernel, as an executor gives them; those that its direction does not have are None.

    Attributes:
        z: (num_receivers, z_dim): the output, or from double backward on the gradient with respect to gz.
        gx: (num_senders, x_dim).
        gy: (num_edges, y_dim).
        gw: (num_edges, weight_numel).
        ga: Gradients with respect to the tangents a, b and c, like those of x, y and w.
        gb: Likewise.
        gc: Likewise.
    """

    z: np.ndarray | None = None
    gx: np.ndarray | None = None
    gy: np.ndarray | None = None
    gw: np.ndarray | None = None
    ga: np.ndarray | None = None
    gb: np.ndarray | None = None
    gc: np.ndarray | None = None

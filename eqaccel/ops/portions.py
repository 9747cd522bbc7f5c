"""How much of a layer there is at a time, so that its weights fit into memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # that file needs those that need this one
    from eqaccel.ops.edge_pairs import PairRange


@dataclass(frozen=True)
class Portions:
    """What may be there at a time of the weights of the edges of a layer.

    Attributes:
        ranges: The pairs, in as many ranges as it takes where their weights have so many bytes; none if all weights may
            be there.
        gradient_bytes: What gradients of the weights of edges may take.
    """

    ranges: Callable[[int], list[PairRange]] = lambda _: []
    gradient_bytes: float = math.inf

    def edges_at_a_time(self, num_edges: int, num_bytes: int) -> int:
        """Of so many edges, those that may have gradients of so many bytes each, in equal portions."""
        count = math.ceil(num_edges * num_bytes / self.gradient_bytes)
        return math.ceil(num_edges / max(1, min(count, num_edges)))

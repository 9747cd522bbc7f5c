"""How much of a layer there is at a time, so that its weights fit into memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:  # that file needs those that need this one
    from eqaccel.ops.edge_pairs import PairRange


@dataclass
class KeptWeights:
    """Weights that were made and are asked for again in the opposite order, as gradients do.

    What finds no more room beside others takes that of the oldest, which have to be made once more.

    Attributes:
        limit: Bytes that all of them may take.
    """

    limit: float = math.inf
    _kept: dict[object, Tensor] = field(default_factory=dict)

    def made(self, owner: object, make: Callable[[], Tensor], num_bytes: int) -> Tensor:
        """Makes weights of so many bytes, and keeps them for their owner; there is room for them before."""
        while self._kept and sum(kept.nbytes for kept in self._kept.values()) + num_bytes > self.limit:
            del self._kept[next(iter(self._kept))]
        self._kept[owner] = made = make()
        return made

    def taken(self, owner: object, make: Callable[[], Tensor], num_bytes: int) -> Tensor:
        """Weights for the last time: those that were kept, or else made anew."""
        if owner not in self._kept:
            self.made(owner, make, num_bytes)
        return self._kept.pop(owner)


@dataclass(frozen=True)
class Portions:
    """What may be there at a time of the weights of the edges of a layer.

    Attributes:
        ranges: The pairs, in as many ranges as it takes where their weights have so many bytes; none if all weights may
            be there.
        gradient_bytes: What gradients of the weights of edges may take.
        kept: Weights of layers that come in portions.
    """

    ranges: Callable[[int], list[PairRange]] = lambda _: []
    gradient_bytes: float = math.inf
    kept: KeptWeights = field(default_factory=KeptWeights)

    def edges_at_a_time(self, num_edges: int, num_bytes: int) -> int:
        """Of so many edges, those that may have gradients of so many bytes each, in equal portions."""
        count = math.ceil(num_edges * num_bytes / self.gradient_bytes)
        return math.ceil(num_edges / max(1, min(count, num_edges)))

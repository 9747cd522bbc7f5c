"""How much of a layer there is at a time, so that weights that edges share fit into memory.

The rules are written in C++ (`csrc/torch/portions.h`), where exported programs find them as well.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eqaccel.ops.edge_pairs import EdgePairs
from eqaccel.ops.library import load_library

load_library()


EDGE_SHARE = 1 / 16
"""Of the memory that there is besides, what weights of edges may take before they are made in ranges."""


class MemoryLimits(NamedTuple):
    """What there may be at a time of weights of edges, in bytes.

    Attributes:
        pairs: Weights of pairs, those of all layers together.
        gradients: Gradients of the weights of edges; what weights leave of theirs these may have too.
        besides: Memory that there is besides: before a layer's own come in many pieces, they take a share of that.
    """

    pairs: float = math.inf
    gradients: float = math.inf
    besides: float = 0.0

    @property
    def edges(self) -> float:
        """Weights of the edges of a layer that are not shared."""
        return max(self.pairs + self.gradients, EDGE_SHARE * self.besides)


UNLIMITED = MemoryLimits()


class Portions:
    """What there may be at a time of the weights of layers over a graph, which an edge and its reverse share.

    Weights of layers that come in portions are kept for their gradients as long as there is room for them.

    Args:
        pairs: The edges and their reverses.
        index: Packed index of the edges; all nodes send and receive.
        limits: What there may be at a time.

    Attributes:
        pairs: As given.
        held: The same for `torch.ops.eqaccel`.
    """

    def __init__(self, pairs: EdgePairs, index: Tensor, limits: MemoryLimits = UNLIMITED) -> None:
        self.pairs = pairs
        of_pairs = pairs.row, pairs.edges, pairs.differ, *pairs.source, pairs.all_reversible
        self.held: Any = torch.classes.eqaccel.Portions(*of_pairs, index, *limits)

    def is_one_portion(self, matrix: Tensor) -> bool:
        """Whether all weights may be there that are products with a matrix, with all gradients, and none of others."""
        return bool(self.held.is_one_portion(matrix.size(1) * matrix.element_size()))

    @property
    def kept_bytes(self) -> float:
        """What weights take that are kept for their gradients."""
        return float(self.held.kept_bytes())

    @property
    def times_made(self) -> int:
        """How often weights of layers, or of a range of one, were made."""
        return int(self.held.times_made())

    @property
    def range_indices(self) -> list[Tensor]:
        """Packed indices of the ranges that edges were dealt out to."""
        indices: list[Tensor] = self.held.range_indices()
        return indices


class WeightLimits:
    """What weights that edges share may take, and gradients of those of edges at a time.

    That is what was asked for, or a few GiB of the memory of a device, of which shares may be halved if it runs out.

    Args:
        asked: Bytes that they may take together; 0 where nobody has said so.
        memory: Bytes that a device has; 0 for those of the machine.
    """

    def __init__(self, asked: float, memory: float) -> None:
        self._held: Any = torch.classes.eqaccel.WeightLimits(float(asked), float(memory))

    def get(self) -> MemoryLimits:
        """As they are now."""
        return MemoryLimits(*self._held.get())

    @property
    def may_be_halved(self) -> bool:
        """Whether they are shares of memory, and not the least ones."""
        return bool(self._held.may_be_halved())

    def halve(self) -> None:
        """Makes them half of what they are."""
        self._held.halve()

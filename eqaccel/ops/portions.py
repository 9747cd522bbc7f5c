"""How much of a layer there is at a time, so that weights that edges share fit into memory.

The rules are written in C++ (`csrc/torch/portions.h`), where exported programs find them as well.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from eqaccel.ops.edge_pairs import EdgePairs
from eqaccel.ops.library import load_library

load_library()


class Portions:
    """What there may be at a time of the weights of layers over a graph, which an edge and its reverse share.

    Weights of layers that come in portions are kept for their gradients as long as there is room for them.

    Args:
        pairs: The edges and their reverses.
        index: Packed index of the edges; all nodes send and receive.
        pair_bytes: Memory that weights of pairs may take, in all.
        gradient_bytes: Memory that gradients of weights of edges may take at a time.

    Attributes:
        pairs: As given.
        held: The same for `torch.ops.eqaccel`.
    """

    def __init__(
        self, pairs: EdgePairs, index: Tensor, pair_bytes: float = math.inf, gradient_bytes: float = math.inf
    ) -> None:
        self.pairs = pairs
        of_pairs = pairs.row, pairs.edges, pairs.differ, *pairs.source, pairs.all_reversible
        self.held: Any = torch.classes.eqaccel.Portions(*of_pairs, index, pair_bytes, gradient_bytes)

    def is_one_portion(self, matrix: Tensor) -> bool:
        """Whether all weights may be there that are products with a matrix, and all of their gradients."""
        return bool(self.held.is_one_portion(matrix.size(1) * matrix.element_size()))

    @property
    def times_made(self) -> int:
        """How often weights of layers that come in portions were made."""
        return int(self.held.times_made())

    @property
    def range_indices(self) -> list[Tensor]:
        """Packed indices of the ranges that edges were dealt out to."""
        indices: list[Tensor] = self.held.range_indices()
        return indices


class WeightLimits:
    """What weights that edges share may take, and gradients of those of edges at a time.

    That is what was asked for, or shares of the memory of a GPU, which may be halved a few times if it runs out.

    Args:
        asked: Bytes that they may take together; 0 where nobody has said so.
        memory: Bytes that a GPU has; infinity for a CPU.

    Attributes:
        asked: As given.
    """

    def __init__(self, asked: float, memory: float) -> None:
        self.asked = asked
        self._held: Any = torch.classes.eqaccel.WeightLimits(float(asked), float(memory))

    def get(self) -> tuple[float, float]:
        """Both, in bytes."""
        pairs, gradients = self._held.get()
        return pairs, gradients

    @property
    def may_be_halved(self) -> bool:
        """Whether they are shares of memory, and not the least ones."""
        return bool(self._held.may_be_halved())

    def halve(self) -> None:
        """Makes them half of what they are."""
        self._held.halve()

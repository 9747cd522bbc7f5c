"""Edges and their reverses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eqaccel.ops.library import call_operator, load_library

if TYPE_CHECKING:  # that file needs this one
    from eqaccel.ops.neighbors import Neighbors

load_library()


@dataclass(frozen=True)
class EdgePairs:
    """Which edges are the reverse of each other: what they receive from is swapped, and their vectors are opposite.

    Attributes:
        row: (num_edges,) int32, the pair of each edge.
        edges: (num_pairs, 2) int32, the edges of each pair; the second is -1 where an edge has no reverse. On a GPU
            there may be room for more pairs where all edges have a reverse: rows beyond the last have -2 there.
        differ: (1,) float64, for `rows_of`: not zero once an edge and its reverse had other values.
        search: What has found them on a GPU; None on a CPU.
        all_reversible: Whether every edge is known to have a reverse, so that numbers of edges need no look.
    """

    row: Tensor
    edges: Tensor
    differ: Tensor
    search: Neighbors | None = None
    all_reversible: bool = False

    @classmethod
    def find(cls, vectors: Tensor, index: Tensor, num_nodes: int) -> EdgePairs:
        """Finds the pairs of any graph: an edge whose reverse is not there, or not exact, is alone.

        Args:
            vectors: (num_edges, 3) float32 or float64 on the CPU, from sender to receiver.
            index: Packed index of the edges.
            num_nodes: Number of nodes; all of them send and receive.

        Raises:
            OperandError: If an operand does not fit.
        """
        row, edges = call_operator(torch.ops.eqaccel.edge_pairs, vectors, index, num_nodes)
        return cls(row, edges, torch.zeros(1, dtype=torch.float64, device="cpu"))

    @property
    def source(self) -> tuple[Tensor, int]:
        """Payload and key of the kernels of `search`; any where operators need none."""
        return (self.row, 0) if self.search is None else (self.search.payload, self.search.key)

    def rows_of(self, values: Tensor, differ: Tensor) -> Tensor:
        """Values of edges, once a pair: those of the first edge, which are good for both if they are the same.

        The gradient of both goes to the first of them. That is right where values depend on an edge by its length
        alone: it does not matter then on which of two opposite vectors a force acts.

        Args:
            values: (num_edges, columns).
            differ: (1,) float64, set to one where an edge and its reverse have other values, on the device; NaN is the
                same as NaN.

        Returns:
            (num_pairs, columns).

        Raises:
            OperandError: If an operand does not fit.
        """
        arguments = (*self.source, values, self.row, self.edges, differ)
        rows: Tensor = call_operator(torch.ops.eqaccel.take_pairs, *arguments)
        return rows

"""The graphs that the benchmarks run on: made from a seed, so that every machine has the same ones."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.spatial import cKDTree
from torch import Tensor

GRAPHS = ("carbon", "dhfr", "covid", "local-NxD", "radius-NxD")
"""Names that `make_graph` knows; N nodes and D neighbours each are numbers."""

_LOCAL_RANGE = 64
_DENSITY = 0.05  # atoms per cubic angstrom; only the number of neighbours matters
_DIAMOND = 0.25 * np.array(
    [[0, 0, 0], [0, 2, 2], [2, 0, 2], [2, 2, 0], [1, 1, 1], [1, 3, 3], [3, 1, 3], [3, 3, 1]], dtype=float
)


@dataclass(frozen=True)
class EdgeList:
    """A directed graph, sorted by receiver and then by sender, as the deterministic mode of the peers needs it.

    Attributes:
        name: What the command line calls it.
        num_nodes: Number of nodes; all of them may send and receive.
        edge_index: (2, num_edges) int64, senders in row 0 and receivers in row 1.
    """

    name: str
    num_nodes: int
    edge_index: Tensor

    @property
    def num_edges(self) -> int:
        """Number of directed edges."""
        return self.edge_index.shape[1]

    @property
    def sender(self) -> Tensor:
        """(num_edges,) the node that each edge reads from."""
        return self.edge_index[0]

    @property
    def receiver(self) -> Tensor:
        """(num_edges,) the node that each edge adds to."""
        return self.edge_index[1]

    def to(self, device: str) -> EdgeList:
        """The same graph on another device."""
        return EdgeList(self.name, self.num_nodes, self.edge_index.to(device))


def make_graph(name: str) -> EdgeList:
    """Builds a graph by its name.

    Args:
        name: "carbon" (jittered diamond, 1000 atoms, 6 angstrom, about 158 neighbours), "dhfr" (1800 random points,
            31 neighbours), "covid" (23000, 5.9), "radius-NxD" (N random points with about D neighbours), or "local-NxD"
            (N nodes with D edges each, whose senders are close in memory, as after a sort along a curve).

    Raises:
        ValueError: If there is no such graph.
    """
    rng = np.random.default_rng(0)
    if name == "carbon":
        return _carbon(name, rng)
    if name in ("dhfr", "covid"):
        return _radius(name, *{"dhfr": (1800, 31.0), "covid": (23000, 5.9)}[name], rng)
    match = re.fullmatch(r"(local|radius)-(\d+)x(\d+)", name)
    if match is None:
        raise ValueError(f"graph: expected one of {', '.join(GRAPHS)}, got {name!r}")
    nodes, degree = int(match[2]), int(match[3])
    return _radius(name, nodes, float(degree), rng) if match[1] == "radius" else _local(name, nodes, degree, rng)


def _carbon(name: str, rng: np.random.Generator) -> EdgeList:
    cells, constant = 5, 3.567
    corners = np.stack(np.meshgrid(*[np.arange(cells)] * 3, indexing="ij"), -1).reshape(-1, 1, 3)
    positions = constant * (corners + _DIAMOND).reshape(-1, 3)
    return _within(name, positions + rng.normal(0, 0.02, positions.shape), constant * cells, 6.0)


def _radius(name: str, nodes: int, degree: float, rng: np.random.Generator) -> EdgeList:
    box = (nodes / _DENSITY) ** (1 / 3)
    return _within(name, rng.uniform(0, box, (nodes, 3)), box, (degree / (4 / 3 * math.pi * _DENSITY)) ** (1 / 3))


def _within(name: str, positions: NDArray[np.float64], box: float, cutoff: float) -> EdgeList:
    """All pairs closer than the cutoff in a periodic cube."""
    if cutoff >= box / 2:  # beyond this a pair of nodes could meet twice, which the search below does not see
        raise ValueError(f"graph: {name} has too many neighbours for its number of nodes")
    pairs = cKDTree(positions % box, boxsize=box).query_pairs(cutoff, output_type="ndarray")
    return _sorted(name, len(positions), np.concatenate([pairs, pairs[:, ::-1]]))


def _local(name: str, nodes: int, degree: int, rng: np.random.Generator) -> EdgeList:
    offsets = np.arange(1, 1 + max(2 * _LOCAL_RANGE, degree)) - _LOCAL_RANGE
    chosen = np.stack([rng.permutation(offsets)[:degree] for _ in range(nodes)])
    receiver = np.repeat(np.arange(nodes), degree)
    return _sorted(name, nodes, np.stack([(receiver + chosen.ravel()) % nodes, receiver], axis=1))


def _sorted(name: str, nodes: int, pairs: NDArray[np.integer]) -> EdgeList:
    sender, receiver = pairs.T.astype(np.int64)
    order = np.lexsort((sender, receiver))
    return EdgeList(name, nodes, torch.from_numpy(np.stack([sender[order], receiver[order]])))

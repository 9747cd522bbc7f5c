"""The graphs that the benchmarks run on: made from a seed, so that every machine has the same ones."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eqaccel import morton_order

_LOCAL_RANGE = 64
_DENSITY = 0.05  # atoms per cubic angstrom; only the number of neighbours matters
_DIAMOND = 0.25 * np.array(
    [[0, 0, 0], [0, 2, 2], [2, 0, 2], [2, 2, 0], [1, 1, 1], [1, 3, 3], [3, 1, 3], [3, 3, 1]], dtype=float
)
_HUB_EDGES, _HUB_OTHERS, _HUB_DEGREE = 20_000, 1000, 60


@dataclass(frozen=True)
class EdgeList:
    """A directed graph, sorted by receiver and then by sender, as the deterministic mode of the peers needs it.

    Attributes:
        name: What the command line calls it.
        num_nodes: Number of nodes; all of them may send and receive.
        edge_index: (2, num_edges) int64, senders in row 0 and receivers in row 1; None for a batch, in which row i of
            the output belongs to row i of all inputs.
    """

    name: str
    num_nodes: int
    edge_index: Tensor | None

    @property
    def num_edges(self) -> int:
        """Number of directed edges, or rows of a batch."""
        return self.num_nodes if self.edge_index is None else self.edge_index.shape[1]

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
        return self if self.edge_index is None else replace(self, edge_index=self.edge_index.to(device))


def batch(rows: int) -> EdgeList:
    """Rows that have nothing to do with each other: no graph at all."""
    return EdgeList("batch", rows, None)


def make_graph(name: str) -> EdgeList:
    """Builds a graph by its name.

    Args:
        name: One of `GRAPHS`; or, with numbers for N and D, "radius-NxD": N random points with about D neighbours;
            "local-NxD": N nodes with D edges each, whose senders are random but close in memory; "ring-NxD": N nodes
            with the D nearest in memory, D even. A graph of points may end in "-morton": the same points, renumbered
            along a Morton curve.

    Raises:
        ValueError: If there is no such graph.
    """
    kind, numbers, morton = read_name(name)
    rng = np.random.default_rng(0)
    if kind in _EDGES:
        return _sorted(name, *_EDGES[kind](*numbers, rng))
    positions, box, cutoff = _POINTS[kind](*numbers, rng)
    order = morton_order(positions, box * np.eye(3)) if morton else slice(None)
    return _within(name, positions[order], box, cutoff)


def read_name(name: str) -> tuple[str, tuple[int, ...], bool]:
    """The kind of a graph, its numbers, and whether it is in Morton order.

    Raises:
        ValueError: If there is no such graph.
    """
    base = name.removesuffix("-morton")
    pattern = re.fullmatch(r"(local|radius|ring)-(\d+)x(\d+)", base)
    kind, *numbers = [base] if pattern is None else [pattern[1], int(pattern[2]), int(pattern[3])]
    sized = kind in ("local", "radius", "ring")
    if sized != bool(numbers) or kind not in (_POINTS if base != name else _POINTS | _EDGES):
        raise ValueError(f"graph: expected one of {', '.join(GRAPHS)}, local-NxD, radius-NxD, ring-NxD, got {name!r}")
    return kind, tuple(numbers), base != name


Points = tuple[NDArray[np.float64], float, float]
"""Positions in a periodic cube, its edge and the cutoff, in angstrom."""


def _carbon(rng: np.random.Generator) -> Points:
    cells, constant = 5, 3.567
    positions = constant * (_cubic(cells)[:, None] + _DIAMOND).reshape(-1, 3)
    return positions + rng.normal(0, 0.02, positions.shape), constant * cells, 6.0


def water_box(cells: int, rng: np.random.Generator) -> Points:
    """So many cells of one molecule of water along each edge of a cube; oxygen, hydrogen, hydrogen."""
    spacing = 3.105  # 33.4 molecules in a cubic nanometre
    oxygen = spacing * _cubic(cells) + rng.normal(0, 0.2, (cells**3, 3))
    # Orthogonal unit vectors a and b of every molecule; its hydrogens are 104.52 degrees apart.
    a, b = np.linalg.qr(rng.normal(size=(cells**3, 3, 2)))[0].transpose(2, 0, 1)
    half = math.radians(104.52 / 2)
    hydrogens = [oxygen + 0.9572 * (a * math.cos(half) + sign * b * math.sin(half)) for sign in (1, -1)]
    return np.stack([oxygen, *hydrogens], axis=1).reshape(-1, 3), spacing * cells, 6.0


def _random_points(nodes: int, degree: float, rng: np.random.Generator) -> Points:
    box = (nodes / _DENSITY) ** (1 / 3)
    return rng.uniform(0, box, (nodes, 3)), box, (degree / (4 / 3 * math.pi * _DENSITY)) ** (1 / 3)


def _cubic(cells: int) -> NDArray[np.int64]:
    return np.stack(np.meshgrid(*[np.arange(cells)] * 3, indexing="ij"), -1).reshape(-1, 3)


Edges = tuple[int, NDArray[np.integer]]
"""A number of nodes, and (num_edges, 2) senders and receivers."""


def _local(nodes: int, degree: int, rng: np.random.Generator) -> Edges:
    offsets = np.arange(1, 1 + max(2 * _LOCAL_RANGE, degree)) - _LOCAL_RANGE
    chosen = np.stack([rng.permutation(offsets)[:degree] for _ in range(nodes)])
    receiver = np.repeat(np.arange(nodes), degree)
    return nodes, np.stack([(receiver + chosen.ravel()) % nodes, receiver], axis=1)


def _ring(nodes: int, degree: int, rng: np.random.Generator | None = None) -> Edges:
    if degree % 2 or degree >= nodes:
        raise ValueError(f"graph: ring-{nodes}x{degree} needs an even number of neighbours below that of its nodes")
    offsets = np.concatenate([np.arange(-degree // 2, 0), np.arange(1, degree // 2 + 1)])
    receiver = np.repeat(np.arange(nodes), degree)
    return nodes, np.stack([(receiver + np.tile(offsets, nodes)) % nodes, receiver], axis=1)


def _hub(rng: np.random.Generator) -> Edges:
    """A ring, and a node that receives from each node of the ring, and sends to it, many times over."""
    ring = _ring(_HUB_OTHERS, _HUB_DEGREE)[1] + 1
    to_hub = np.stack([np.arange(_HUB_EDGES) % _HUB_OTHERS + 1, np.zeros(_HUB_EDGES, dtype=np.int64)], axis=1)
    return _HUB_OTHERS + 1, np.concatenate([ring, to_hub, to_hub[:, ::-1]])


def _hub_even(rng: np.random.Generator) -> Edges:
    return _ring(_HUB_OTHERS, _HUB_DEGREE + 2 * _HUB_EDGES // _HUB_OTHERS)


_POINTS: dict[str, Callable[..., Points]] = {
    "radius": _random_points,
    "carbon": _carbon,
    "dhfr": partial(_random_points, 1800, 31.0),
    "covid": partial(_random_points, 23000, 5.9),
    "water": partial(water_box, 12),
}
_EDGES: dict[str, Callable[..., Edges]] = {"local": _local, "ring": _ring, "hub": _hub, "hub-even": _hub_even}

GRAPHS: dict[str, str] = {
    "carbon": "diamond, 1000 atoms, 6 angstrom: 158 neighbours",
    "dhfr": "1800 random points with 31 neighbours, the size of DHFR 1DRF",
    "covid": "23 000 random points with 5.9 neighbours, the size of the spike 6VXX, in no spatial order",
    "covid-morton": "the same points along a Morton curve",
    "water": "1728 molecules of water, 6 angstrom: 86 neighbours",
    "hub": "a node with 20 000 edges each way beside 1000 nodes with 60 and its",
    "hub-even": "as many edges spread evenly over 1000 nodes",
    "ring-64x60": "64 nodes with 60 neighbours, a small crystal",
    "ring-21x20": "21 nodes, all of them neighbours: a molecule",
}
"""The graphs with names of their own, and what they are."""


def _within(name: str, positions: NDArray[np.float64], box: float, cutoff: float) -> EdgeList:
    """All pairs closer than the cutoff in a periodic cube."""
    from scipy.spatial import cKDTree  # only here: the help of the command has to come without it

    if cutoff >= box / 2:  # beyond this a pair of nodes could meet twice, which the search below does not see
        raise ValueError(f"graph: {name} has too many neighbours for its number of nodes")
    pairs = cKDTree(positions % box, boxsize=box).query_pairs(cutoff, output_type="ndarray")
    return _sorted(name, len(positions), np.concatenate([pairs, pairs[:, ::-1]]))


def _sorted(name: str, nodes: int, pairs: NDArray[np.integer]) -> EdgeList:
    sender, receiver = pairs.T.astype(np.int64)
    order = np.argsort(receiver * nodes + sender, kind="stable")
    return EdgeList(name, nodes, torch.from_numpy(np.stack([sender[order], receiver[order]])))

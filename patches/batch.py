"""Batches of structures in memory of a fixed size: what is beyond the batch is a structure of its own.

Its atoms, the blank ones, are far from each other and from nothing else, since no edge leads to them but those that
fill the memory, which are longer than the cutoff. So they change nothing in what a model says of the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Per = Literal["nodes", "edges", "structures"]
"""What there is an entry for."""


class Extent(NamedTuple):
    """Numbers of atoms, edges and structures."""

    nodes: int
    edges: int
    structures: int

    def fits(self, room: Extent) -> bool:
        """Whether there is room for so many, and for the structure of blank atoms."""
        enough = self.nodes + num_blank(room.nodes) <= room.nodes and self.edges <= room.edges
        return enough and self.structures < room.structures

    def grown(self) -> Extent:
        """Room for these and a few more, in sizes that differ by 1/16 at most and 1/32 at least."""
        nodes = _rounded(self.nodes + 1)
        while self.nodes + num_blank(nodes) > nodes:
            nodes = _rounded(nodes + 1)
        return Extent(nodes, _rounded(max(self.edges, 1)), self.structures + 1)


def num_blank(nodes: int) -> int:
    """How many of so many nodes are blank at least: enough to share the edges that fill the memory."""
    return max(8, nodes // 64)


def _rounded(count: int) -> int:
    step = max(1, 1 << max(count.bit_length() - 5, 0))
    return -(-count // step) * step


@dataclass(frozen=True)
class Field:
    """How the entries of an input of a model lie.

    Attributes:
        per: What there is an entry for.
        rows: Rows of each entry.
        more: Rows besides.
        dim: Dimension of the rows.
    """

    per: Per
    rows: int = 1
    more: int = 0
    dim: int = 0

    def length(self, extent: Extent) -> int:
        """Number of rows."""
        return int(getattr(extent, self.per)) * self.rows + self.more


@dataclass(frozen=True)
class Batch:
    """What a model is called with in a step of training.

    Attributes:
        inputs: What it reads, by name; detached.
        extent: How many atoms, edges and structures these are.
        options: What else the call says, by name.
    """

    inputs: Mapping[str, Tensor]
    extent: Extent
    options: tuple[tuple[str, Any], ...] = ()

    def signature(self, fields: Mapping[str, Field]) -> tuple[Any, ...]:
        """What batches have in common that fit into the same memory, if that is large enough."""
        shapes = []
        for name, value in self.inputs.items():
            shape = list(value.shape)
            del shape[fields[name].dim]
            shapes.append((name, value.dtype, tuple(shape)))
        return (*shapes, *self.options)


class PaddedBatch:
    """Memory for the inputs of a model.

    Args:
        blank: Inputs for blank atoms alone, of the size of the memory, on the device.
        fields: How they lie.

    Attributes:
        inputs: By name; they stay where they are.
    """

    def __init__(self, blank: Mapping[str, Tensor], fields: Mapping[str, Field]) -> None:
        self._blank = blank
        self._fields = fields
        self.inputs = {name: value.clone() for name, value in blank.items()}

    def fill(self, batch: Batch) -> None:
        """Puts a batch in, and blank atoms behind it."""
        with torch.no_grad():
            for name, value in batch.inputs.items():
                dim, blank = self._fields[name].dim, self._blank[name]
                begin = value.size(dim)
                rest = blank.narrow(dim, begin, blank.size(dim) - begin)
                # By another name of the memory: autograd counts changes, and a gradient may be recorded after this one.
                torch.cat((value, rest), dim, out=self.inputs[name].data)


def blank_positions(nodes: int, cutoff: float, like: Tensor) -> Tensor:
    """Places that are far from each other, (nodes, 3), of the dtype and on the device of a tensor."""
    places = like.new_zeros(nodes, 3)
    places[:, 0] = 2 * cutoff * torch.arange(nodes, device=like.device)
    return places


def blank_edges(extent: Extent, like: Tensor) -> Tensor:
    """Edges between the last nodes, (2, edges), from each to the next one, in turn."""
    count = num_blank(extent.nodes)
    turn = torch.arange(extent.edges, device=like.device)
    rows = torch.stack([turn % count, (turn + 1) % count])
    return (rows + (extent.nodes - count)).to(like.dtype)

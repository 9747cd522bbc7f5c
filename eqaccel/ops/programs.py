"""A graph that is sorted already, for exported programs, whose layers know nothing of Python's scopes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from eqaccel.ops.graph import GivenEdges
from eqaccel.ops.library import call_operator, load_library

load_library()


@dataclass
class ProgramUse:
    """What programs did with a graph; known when they have run.

    Attributes:
        differed: Whether a layer had as many edges, and others. Where it took rows of pairs, results are wrong.
        values_differed: Whether values were not the same for an edge and its reverse; they were not shared.
        shared: Whether values were shared.
    """

    differed: bool = False
    values_differed: bool = False
    shared: bool = False


@contextmanager
def given_to_programs(edges: GivenEdges) -> Iterator[ProgramUse]:
    """Inside of it, exported programs of this thread take the packed index, and share weights of pairs.

    There are as many of these at a time as `GivenEdges.limits` say, shared or not.

    Args:
        edges: The graph. With `check` layers are compared with it, once, before what is recorded.
    """
    portions = None if edges.portions is None else edges.portions.held
    arguments = edges.edge_index, edges.index, edges.num_nodes, edges.check, portions
    number = call_operator(torch.ops.eqaccel.give_graph, *arguments, *edges.limits)
    use = ProgramUse()
    try:
        yield use
    finally:
        use.differed, use.values_differed, use.shared = torch.ops.eqaccel.take_graph(number)

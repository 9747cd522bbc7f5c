"""Edge lists, sorted once for both directions of a convolution."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eqaccel.errors import GraphError
from eqaccel.ops.library import is_traced, load_library, translate
from eqaccel.ops.portions import UNLIMITED, MemoryLimits, Portions

if TYPE_CHECKING:  # that file needs this one
    from eqaccel.ops.edge_pairs import EdgePairs

load_library()


class Graph:
    """The edges of a graph, ready for convolutions: build one for each neighbour list and use it in every layer.

    A *slot* is a position in the order (receiver, sender, edge number). Sums run over slots, so that results depend
    neither on threads nor, for edges that differ, on how they are numbered.

    Args:
        receiver: (num_edges,) int32 or int64, the node each edge adds to; any order, any strides.
        sender: (num_edges,) int32 or int64, the node each edge reads from; same device.
        num_receivers: Number of nodes that receive: rows of the output.
        num_senders: Number of nodes that send: rows of the node features; default num_receivers.

    Attributes:
        index: (3 num_edges + num_receivers + num_senders + 4,) int32: num_receivers, num_senders, row_ptr, edge,
            sender, t_row_ptr, t_slot. Convolutions check that its numbers of nodes and edges are those of the call.
        num_receivers: As given.
        num_senders: As given.
        num_edges: Number of edges.

    Raises:
        GraphError: If dtype, shape, device or number of the edges is wrong, or an index is outside of the nodes. On a
            GPU indices are checked only if EQACCEL_CHECK_INDICES is 1, because that waits for the device.
    """

    def __init__(self, receiver: Tensor, sender: Tensor, num_receivers: int, num_senders: int | None = None) -> None:
        self.num_receivers = num_receivers
        self.num_senders = num_receivers if num_senders is None else num_senders
        self.num_edges = receiver.numel()
        self.index = _sort(receiver, sender, self.num_receivers, self.num_senders)

    @classmethod
    def from_edge_index(cls, edge_index: Tensor, num_nodes: int, receiver_row: int = 1) -> Graph:
        """Builds a graph from a (2, num_edges) tensor.

        Args:
            edge_index: (2, num_edges) int32 or int64.
            num_nodes: Number of nodes; all of them send and receive.
            receiver_row: Row that holds the receivers: 1 in MACE, 0 in NequIP.

        Raises:
            GraphError: As for `Graph`, or if the shape is not (2, num_edges).
        """
        _check_edge_index(edge_index)
        return cls(edge_index[receiver_row], edge_index[1 - receiver_row], num_nodes)

    def to(self, device: torch.device | str) -> Graph:
        """The same graph on another device; self if it is there already."""
        with torch.inference_mode(False):  # what is made under it could not be saved for a backward pass later
            index = self.index.to(device)
        if index is self.index:
            return self
        moved = Graph.__new__(Graph)
        moved.__dict__.update(num_receivers=self.num_receivers, num_senders=self.num_senders, index=index)
        moved.num_edges = self.num_edges
        return moved

    @property
    def row_ptr(self) -> Tensor:
        """(num_receivers + 1,) int32: first slot of each receiver."""
        return self._part(0)

    @property
    def edge(self) -> Tensor:
        """(num_edges,) int32: edge held by each slot."""
        return self._part(1)

    @property
    def sender(self) -> Tensor:
        """(num_edges,) int32: sender of the edge in each slot."""
        return self._part(2)

    @property
    def t_row_ptr(self) -> Tensor:
        """(num_senders + 1,) int32: first entry of `t_slot` of each sender."""
        return self._part(3)

    @property
    def t_slot(self) -> Tensor:
        """(num_edges,) int32: slots ordered by sender."""
        return self._part(4)

    @functools.cached_property
    def is_sorted(self) -> bool:
        """Whether the edges came in slot order already; the first look waits for the device."""
        return bool(torch.equal(self.edge, torch.arange(self.num_edges, dtype=torch.int32, device=self.edge.device)))

    def _part(self, number: int) -> Tensor:
        sizes = [2, self.num_receivers + 1, self.num_edges, self.num_edges, self.num_senders + 1, self.num_edges]
        return self.index.split(sizes)[number + 1]

    def __repr__(self) -> str:
        return (
            f"Graph(num_receivers={self.num_receivers}, num_senders={self.num_senders}, num_edges={self.num_edges}, "
            f"device={self.index.device})"
        )


def packed_index(edge_index: Tensor, num_receivers: int, num_senders: int) -> Tensor:
    """`Graph.index` of a MACE-like edge index; inside a `sorting_scope`, layers with the same edges share one sort.

    Args:
        edge_index: (2, num_edges) int32 or int64, senders in row 0 and receivers in row 1; or a packed index, which is
            returned as it is.
        num_receivers: Rows of the output.
        num_senders: Rows of the node features.

    Raises:
        GraphError: As for `Graph`.
    """
    if edge_index.dim() == 1:
        return edge_index
    if not torch.compiler.is_compiling():
        _check_edge_index(edge_index)
    return packed_rows(edge_index[1], edge_index[0], num_receivers, num_senders)


def packed_rows(receiver: Tensor, sender: Tensor, num_receivers: int, num_senders: int) -> Tensor:
    """`Graph.index` of the two rows of an edge index; inside a `sorting_scope`, layers with the same rows share it.

    Args:
        receiver: (num_edges,) int32 or int64.
        sender: (num_edges,) int32 or int64.
        num_receivers: Rows of the output.
        num_senders: Rows of the node features.

    Raises:
        GraphError: As for `Graph`.
    """
    if torch.compiler.is_compiling():
        return torch.ops.eqaccel.graph(receiver, sender, num_receivers, num_senders)
    given = _scope.given
    rows = (receiver, sender)
    if given is not None and given.are(*rows, num_receivers, num_senders):
        return given.index
    known = _scope.known
    if known is None or not all(map(_may_share, rows)):
        return _sort(receiver, sender, num_receivers, num_senders)
    key = (*map(identity, rows), num_receivers, num_senders)
    if key not in known or not known[key].is_of(rows):
        index = _sort(receiver, sender, num_receivers, num_senders)
        known[key] = _SortedRows.of(rows, index)
    return known[key].index


def sorting_scope() -> AbstractContextManager[None]:
    """Inside of it, layers that are called with the same edges share one sort: open it around one call of a model.

    Outside of every scope nothing is remembered, and a scope forgets everything when it ends, whether by an error or
    not. So edges may change between calls in any way, through NumPy, DLPack, shared memory or `.data` too. Within one
    scope the same edges are the same memory, seen through the same shape, strides and dtype, on the same stream, that
    torch has not modified in place since. On a CPU they are compared with a copy as well, which costs little beside
    the sort.

    A scope belongs to the thread that opened it. A scope inside of another starts empty, and the outer one goes on
    when it ends. While a program is traced, compiled or transformed, or a CUDA graph is captured, scopes change
    nothing: there every sort belongs to what is recorded.

    Example:
        with sorting_scope():
            for conv, y, w in layers:
                x = conv(x, y, w, edge_index)
    """
    return nullcontext() if torch.compiler.is_compiling() else _open_scope()


class _Scope(threading.local):
    """The sorts of the innermost open scope of a thread; None outside of every scope."""

    known: dict[Hashable, _SortedRows] | None = None
    given: GivenEdges | None = None


_scope = _Scope()


@contextmanager
def _open_scope() -> Iterator[None]:
    outer = _scope.known
    _scope.known = {}
    try:
        yield
    finally:
        _scope.known = outer


@contextmanager
def given_edges(edges: GivenEdges) -> Iterator[None]:
    """Inside of it, layers over the edges of a graph that is sorted already take its packed index.

    That holds while a CUDA graph is captured too. Layers over other edges are told by their numbers of edges and nodes.
    """
    outer = _scope.given
    _scope.given = edges
    try:
        yield
    finally:
        _scope.given = outer


def told_by_number(edge_index: Tensor) -> bool:
    """Whether an edge index could be taken for others here: for those that are given, if it is their reverse, say.

    Args:
        edge_index: (2, num_edges).
    """
    given = _scope.given
    if given is None or given.check:
        return False
    known = given.edge_index if given.read is None else given.read
    return known.data_ptr() != edge_index.data_ptr()


@dataclass(frozen=True)
class EdgeRange:
    """The edges that a range of nodes receives.

    Attributes:
        num_rows: Number of these nodes.
        slots: (capacity,) int64, where the edges are among all; those after the last are others, or behind the end.
        index: Packed index of these edges, numbered from the first; all nodes send.
    """

    num_rows: int
    slots: Tensor
    index: Tensor


@dataclass(frozen=True)
class GivenEdges:
    """Edges that are sorted already.

    Attributes:
        edge_index: (2, num_edges) int64, senders and receivers, in the order of slots.
        index: Packed index of these edges.
        num_nodes: Number of nodes; all of them send and receive.
        check: Whether to look at once whether the edges of every layer are these, and values of edges those of their
            reverses, which waits for a GPU. What is captured cannot wait, so run it once with the check before; values
            are compared there too, by the device, which says in `EdgePairs.differ` what it has found.
        row_ptr: (num_nodes + 1,), first slot of each receiver, or about so: by this, nodes are dealt out to ranges.
        limits: What there may be at a time of weights of edges; what finds no room is made in pieces.
        slack: Room for edges of a range, of those that it has by `row_ptr`.
        excess: Filled with a (1,) int32 for each range that was made: how many edges did not fit, if positive.
        pairs: The edges and their reverses; None if weights are not to be shared.
        read: What the model reads, where that is not `edge_index` itself: the same edges, maybe with receivers first.
        shared: Filled with the rows that `given_pairs` gave.
        portions: What may be there of weights of pairs; None without pairs.
        differ: Filled with noted values that were looked at, and were not the same for an edge and its reverse.
    """

    edge_index: Tensor
    index: Tensor
    num_nodes: int
    check: bool = True
    row_ptr: NDArray[np.int32] | None = None
    limits: MemoryLimits = UNLIMITED
    slack: float = 1.0
    excess: list[Tensor] = field(default_factory=list)
    pairs: EdgePairs | None = None
    read: Tensor | None = None
    shared: list[Tensor] = field(default_factory=list)
    differ: list[Tensor] = field(default_factory=list)
    portions: Portions | None = field(init=False)
    _of_pairs: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)
    _computed: dict[Hashable, tuple[tuple[Tensor, ...], Tensor]] = field(default_factory=dict)
    _ranges: dict[int, list[EdgeRange]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        portions = None if self.pairs is None else Portions(self.pairs, self.index, self.limits)
        object.__setattr__(self, "portions", portions)

    def are(self, receiver: Tensor, sender: Tensor, num_receivers: int, num_senders: int) -> bool:
        """Whether these are the edges of a layer."""
        own = self.edge_index
        if (num_receivers, num_senders, receiver.numel()) != (self.num_nodes, self.num_nodes, own.size(1)):
            return False
        return not self.check or (torch.equal(own[1], receiver) and torch.equal(own[0], sender))

    def ranges(self, weight_bytes: int) -> list[EdgeRange]:
        """The edges in ranges for which weights take the memory that they may take; none if all of them may.

        Args:
            weight_bytes: What the weights of all edges take.
        """
        count = math.ceil(weight_bytes / self.limits.edges)
        if count <= 1 or self.row_ptr is None:
            return []
        if count not in self._ranges:
            wanted = np.linspace(0, self.row_ptr[-1], count + 1)[1:-1]
            ends = np.searchsorted(self.row_ptr, wanted)
            rows = np.unique(np.concatenate([[0], ends, [self.num_nodes]]))
            self._ranges[count] = [self._range(int(begin), int(end)) for begin, end in pairwise(rows)]
        return self._ranges[count]

    def note(self, values: Tensor) -> None:
        """See `depend_on_lengths`."""
        if self.pairs is None or values.size(0) != self.edge_index.size(1):
            return
        if any(known is values for known, _ in self._of_pairs):
            return
        flag = torch.zeros_like(self.pairs.differ) if self.check else self.pairs.differ
        rows = self.pairs.rows_of(values, flag)
        differ = self.check and bool(flag)
        self._of_pairs.append((values, None if differ else rows))
        if differ:
            self.differ.append(values)

    def rows_of(self, values: Tensor) -> Tensor | None:
        """Rows of pairs of noted values; None of others, or where edges and their reverses differ."""
        return next((rows for known, rows in self._of_pairs if known is values), None)

    def once(self, function: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> Tensor:
        """See `computed_once`. The tensors are held, so that no others can come to lie at the same address."""
        key = function, *map(identity, tensors)
        if key not in self._computed:
            self._computed[key] = tensors, function(*tensors)
        return self._computed[key][1]

    def _range(self, begin: int, end: int) -> EdgeRange:
        assert self.row_ptr is not None
        capacity = max(1, math.ceil((self.row_ptr[end] - self.row_ptr[begin]) * self.slack))
        index, slots, count = torch.ops.eqaccel.graph_rows(self.index, self.num_nodes, begin, end, capacity)
        self.excess.append(count - capacity)
        return EdgeRange(end - begin, slots, index)


def given_ranges(receiver: Tensor, sender: Tensor, num_nodes: int, weight_bytes: int) -> list[EdgeRange]:
    """`GivenEdges.ranges` of the edges that a scope gives; none outside of one, or for other edges."""
    given = _scope.given
    if given is None or not given.are(receiver, sender, num_nodes, num_nodes):
        return []
    return given.ranges(weight_bytes)


def depend_on_lengths(values: Tensor) -> None:
    """Says of an array with a row for each edge, inside of `given_edges`, that gradients see lengths alone in it.

    So what is made of these rows may be made once for an edge and its reverse, where both have the same values. That is
    looked at, see `GivenEdges.check`. It holds for this very tensor, whatever others have in common with it.

    Args:
        values: (num_edges, columns).
    """
    if not torch.compiler.is_compiling() and _scope.given is not None:
        _scope.given.note(values)


def computed_once(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """What a function gives for some tensors; inside of `given_edges` it is asked once, however many layers need that.

    Args:
        function: Without gradients, of the tensors alone; the same object each time.
        tensors: Its arguments.
    """
    if _scope.given is None or torch.compiler.is_compiling() or any(tensor.requires_grad for tensor in tensors):
        return function(*tensors)
    return _scope.given.once(function, tensors)


@dataclass(frozen=True)
class PairRows:
    """Rows of an array of edges, once for an edge and its reverse.

    Attributes:
        rows: (num_pairs, columns).
        portions: The edges and their reverses, and what may be there at a time.
    """

    rows: Tensor
    portions: Portions


def given_pairs(receiver: Tensor, sender: Tensor, num_nodes: int, values: Tensor) -> PairRows | None:
    """What is shared by the edges that a scope gives; None for others, and for values that are not the same for pairs.

    Args:
        receiver: (num_edges,).
        sender: (num_edges,).
        num_nodes: Number of nodes.
        values: (num_edges, columns), of which `depend_on_lengths` was said.
    """
    given = _scope.given
    if given is None or given.portions is None or not given.are(receiver, sender, num_nodes, num_nodes):
        return None
    rows = given.rows_of(values)
    if rows is None:
        return None
    given.shared.append(rows)
    return PairRows(rows, given.portions)


@dataclass(frozen=True)
class _SortedRows:
    """A sort, and what tells whether it is still that of the rows it was made of."""

    index: Tensor
    copies: tuple[Tensor, ...]  # of rows on a CPU; elsewhere comparing them would wait for the device
    memory: tuple[torch.UntypedStorage, ...]  # held, so that no other rows can come to lie at the same address

    @classmethod
    def of(cls, rows: tuple[Tensor, Tensor], index: Tensor) -> _SortedRows:
        copies = tuple(row.clone() for row in rows if row.is_cpu)
        return cls(index, copies, tuple(row.untyped_storage() for row in rows))

    def is_of(self, rows: tuple[Tensor, Tensor]) -> bool:
        return not self.copies or all(map(torch.equal, self.copies, rows))


def identity(row: Tensor) -> Hashable:
    """What two rows have in common that hold the same edges, unless these were written to behind torch's back."""
    version = 0 if row.is_inference() else row._version
    stream = torch.cuda.current_stream(row.device).cuda_stream if row.is_cuda else 0
    return row.data_ptr(), row.device, row.dtype, row.shape, row.stride(), version, stream


def _may_share(row: Tensor) -> bool:
    return not (
        type(row) is not Tensor
        or (row.is_inference() and not row.is_cpu)  # without a version, so that only comparing finds changes
        or is_traced()
        or torch._C._functorch.peek_interpreter_stack() is not None  # vmap and friends
        or (row.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def _sort(receiver: Tensor, sender: Tensor, num_receivers: Any, num_senders: Any) -> Tensor:
    try:
        return torch.ops.eqaccel.graph(receiver, sender, num_receivers, num_senders)
    except (IndexError, RuntimeError) as error:
        raise translate(error) from None


def _check_edge_index(edge_index: Tensor) -> None:
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        raise GraphError(
            f"edge_index: expected shape (2, num_edges), got {tuple(edge_index.shape)}. Pass senders and receivers as "
            "two rows, or the packed index of a Graph."
        )

"""Edge lists, sorted once for both directions of a convolution."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from eqaccel.errors import GraphError
from eqaccel.ops.library import load_library, translate

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
        index: (3 num_edges + num_receivers + num_senders + 2,) int32: row_ptr, edge, sender, t_row_ptr, t_slot.
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
        sizes = [self.num_receivers + 1, self.num_edges, self.num_edges, self.num_senders + 1, self.num_edges]
        return self.index.split(sizes)[number]

    def __repr__(self) -> str:
        return (
            f"Graph(num_receivers={self.num_receivers}, num_senders={self.num_senders}, num_edges={self.num_edges}, "
            f"device={self.index.device})"
        )


def packed_index(edge_index: Tensor, num_receivers: int, num_senders: int) -> Tensor:
    """`Graph.index` of a MACE-like edge index, remembered so that the layers of a model sort it once.

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
    """`Graph.index` of two rows of one edge index, remembered so that the layers of a model sort it once.

    What is remembered belongs to the tensor that both are views of, because every layer takes the rows anew. It is kept
    for as long as that tensor is alive and has not been modified in place; a change that torch does not see (through
    `.data` or NumPy) is not seen here either. Nothing is remembered while a program is traced or a CUDA graph captured:
    there the sort belongs to what is recorded.

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
    owner = receiver._base
    if owner is None or sender._base is not owner or not _may_remember(owner):
        return _sort(receiver, sender, num_receivers, num_senders)
    stream = torch.cuda.current_stream(owner.device).cuda_stream if owner.is_cuda else 0
    rows = [(row.storage_offset(), row.stride(), row.shape) for row in (receiver, sender)]
    state = (owner._version, rows, num_receivers, num_senders, stream)
    known = _remembered.get(owner)
    if known is not None and known[0] == state:
        return known[1]
    index = _sort(receiver, sender, num_receivers, num_senders)
    _remembered[owner] = (state, index)
    return index


_remembered: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _may_remember(tensor: Tensor) -> bool:
    return not (
        type(tensor) is not Tensor
        or tensor.is_inference()
        or torch.jit.is_tracing()
        or torch._C._len_torch_dispatch_stack() > 0  # fake tensors, make_fx, export
        or torch._C._functorch.peek_interpreter_stack() is not None  # vmap and friends
        or (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
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

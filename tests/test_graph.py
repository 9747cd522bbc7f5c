"""Graphs: the packed order, and its errors."""

import numpy as np
import pytest
import torch

from eqaccel import Graph, TensorProductConv, TensorProductSpec
from eqaccel.errors import GraphError

SPEC = TensorProductSpec.channelwise("2x0e", "0e", "0e")


def random_edges(receivers, senders, edges, device, dtype=torch.int64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    receiver = torch.randint(max(receivers, 1), (edges,), generator=generator)
    sender = torch.randint(max(senders, 1), (edges,), generator=generator)
    return receiver.to(device, dtype), sender.to(device, dtype)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("receivers", "senders", "edges"),
    [(0, 0, 0), (0, 3, 0), (4, 2, 0), (1, 1, 1), (1, 1, 5), (5, 9, 200), (300, 200, 90)],
)
def test_order(receivers, senders, edges, index_dtype, device):
    receiver, sender = random_edges(receivers, senders, edges, device, index_dtype)
    graph = Graph(receiver, sender, receivers, senders)
    r, s = receiver.cpu().numpy(), sender.cpu().numpy()
    edge = np.lexsort((np.arange(edges), s, r))
    t_slot = np.lexsort((np.arange(edges), s[edge]))
    expected = {
        "row_ptr": np.searchsorted(r[edge], np.arange(receivers + 1)),
        "edge": edge,
        "sender": s[edge],
        "t_row_ptr": np.searchsorted(s[edge][t_slot], np.arange(senders + 1)),
        "t_slot": t_slot,
    }
    assert graph.index.dtype == torch.int32
    assert graph.index.numel() == 3 * edges + receivers + senders + 2
    for name, values in expected.items():
        np.testing.assert_array_equal(getattr(graph, name).cpu().numpy(), values, err_msg=name)


def test_non_contiguous_and_mixed_indices(device):
    receiver, sender = random_edges(7, 7, 40, device)
    expected = Graph(receiver, sender, 7).index
    pairs = torch.stack([sender, receiver], 1)
    assert torch.equal(Graph(pairs[:, 1], pairs[:, 0], 7).index, expected)
    assert torch.equal(Graph(receiver.int(), sender, 7).index, expected)


def test_from_edge_index(device):
    receiver, sender = random_edges(7, 7, 40, device)
    expected = Graph(receiver, sender, 7).index
    assert torch.equal(Graph.from_edge_index(torch.stack([sender, receiver]), 7).index, expected)
    assert torch.equal(Graph.from_edge_index(torch.stack([receiver, sender]), 7, receiver_row=0).index, expected)


def test_is_sorted(device):
    receiver, sender = random_edges(7, 7, 40, device)
    graph = Graph(receiver, sender, 7)
    assert not graph.is_sorted
    order = graph.edge.long()
    assert Graph(receiver[order], sender[order], 7).is_sorted
    assert Graph(receiver[:0], sender[:0], 7).is_sorted


def test_to_and_repr(device):
    receiver, sender = random_edges(7, 8, 40, "cpu")
    graph = Graph(receiver, sender, 7, 8)
    assert graph.to("cpu") is graph
    moved = graph.to(device)
    assert (moved.num_receivers, moved.num_senders, moved.num_edges) == (7, 8, 40)
    assert torch.equal(moved.edge.cpu(), graph.edge)
    assert "num_receivers=7, num_senders=8, num_edges=40" in repr(moved)


@pytest.mark.parametrize(
    ("receiver", "sender", "message"),
    [
        ([0, 5], [0, 1], r"'receiver' must hold values from 0 to 4 \(num_receivers = 5\), got 5 at position 1"),
        ([0, 1], [-1, 1], r"'sender' must hold values from 0 to 2 \(num_senders = 3\), got -1 at position 0"),
        ([0, 1], [0, 1, 2], r"one entry for each edge, got 2 and 3"),
        ([0.0], [0], r"'receiver' must be int32 or int64, got Float"),
        ([[0]], [0], r"'receiver' must have shape \(num_edges,\), got \[1, 1\]"),
    ],
)
def test_errors(receiver, sender, message):
    with pytest.raises(GraphError, match=message):
        Graph(torch.tensor(receiver), torch.tensor(sender), 5, 3)


def test_too_many_nodes():
    empty = torch.empty(0, dtype=torch.int64)
    with pytest.raises(GraphError, match="number of receivers must be at least 0 and below 2147483647, got 2147483648"):
        Graph(empty, empty, 2**31)


def test_edge_index_shape():
    with pytest.raises(GraphError, match=r"edge_index: expected shape \(2, num_edges\), got \(3, 4\)"):
        Graph.from_edge_index(torch.zeros(3, 4, dtype=torch.int64), 4)
    with pytest.raises(GraphError, match="got 4 at position 0"):
        TensorProductConv(SPEC)(torch.zeros(2, 2), torch.zeros(1, 1), torch.zeros(1, 2), torch.tensor([[0], [4]]))


@pytest.mark.gpu
def test_gpu_indices_are_checked_on_request(monkeypatch):
    monkeypatch.setenv("EQACCEL_CHECK_INDICES", "1")
    with pytest.raises(GraphError, match="got 5 at position 1"):
        Graph(torch.tensor([0, 5], device="cuda"), torch.tensor([0, 1], device="cuda"), 5)

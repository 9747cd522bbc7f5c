"""Graphs: the packed order, and its errors."""

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

from eqaccel import Graph, TensorProductConv, TensorProductSpec
from eqaccel.errors import GraphError, OperandError, SettingsError
from eqaccel.ops.graph import packed_index, sorting_scope
from eqaccel.testing import random_operands

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
    assert graph.index.numel() == 3 * edges + receivers + senders + 4
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
@pytest.mark.parametrize("yes", ["1", "True", "YES", " on "])
def test_gpu_indices_are_checked_on_request(yes, monkeypatch):
    monkeypatch.setenv("EQACCEL_CHECK_INDICES", yes)
    with pytest.raises(GraphError, match="got 5 at position 1"):
        Graph(torch.tensor([0, 5], device="cuda"), torch.tensor([0, 1], device="cuda"), 5)
    monkeypatch.setenv("EQACCEL_CHECK_INDICES", "maybe")
    with pytest.raises(SettingsError, match="EQACCEL_CHECK_INDICES: expected 1 or 0, got 'maybe'"):
        Graph(torch.tensor([0], device="cuda"), torch.tensor([0], device="cuda"), 5)


@pytest.mark.parametrize(
    "make", [lambda g: g.to(g.index.device), copy.deepcopy, lambda g: pickle.loads(pickle.dumps(g))]
)
def test_graphs_under_inference_mode_serve_gradients_later(make, device):
    edges = torch.stack(random_edges(6, 6, 30, device))
    conv, operands = TensorProductConv(SPEC).to(device), random_operands(SPEC, 6, 30, device=device)
    x = operands.x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(conv(x, operands.y, operands.w, edges).sum(), x)
    with torch.inference_mode():
        graphs = [Graph.from_edge_index(edges, 6), Graph.from_edge_index(edges.clone(), 6)]
        graphs.append(Graph.from_edge_index(edges.cpu(), 6).to(device))
        with sorting_scope():
            index = packed_index(edges, 6, 6)
    for graph in (*graphs, make(graphs[0])):
        (found,) = torch.autograd.grad(conv.convolve(x, operands.y, operands.w, graph).sum(), x)
        assert torch.equal(found, expected)
    assert not index.is_inference()


@pytest.mark.parametrize(
    ("receivers", "senders", "edges"), [(7, 5, 30), (5, 7, 30), (9, 9, 28), (3, 3, 32), (0, 6, 32)]
)
@pytest.mark.parametrize("forget", [lambda i: i, torch.clone, copy.deepcopy, lambda i: torch.stack([i, i])[1]])
def test_packed_index_of_another_graph_is_refused(forget, receivers, senders, edges, device):
    """Of the right length, so that sizes alone do not tell."""
    index = forget(Graph(*random_edges(6, 6, 30, device), 6).index)
    assert index.numel() == 3 * edges + receivers + senders + 4
    conv, o = (
        TensorProductConv(SPEC).to(device),
        random_operands(SPEC, receivers, edges, num_senders=senders, device=device),
    )
    message = f"'graph' must be built for {receivers} receivers and {senders} senders, .* got one for 6 .* 6 senders"
    for _ in range(2):
        with pytest.raises(OperandError, match=message):
            conv(o.x, o.y, o.w, index, receivers)
    with pytest.raises(RuntimeError, match=message):
        torch.jit.script(conv)(o.x, o.y, o.w, index, receivers)
    gz, tail = o.x.new_zeros(receivers, SPEC.z_dim), (index, receivers, SPEC.z_dim, True, True)
    ops, operands = torch.ops.eqaccel, (gz, o.x, o.y, o.w)
    with pytest.raises(RuntimeError, match=message):
        ops.tensor_product_backward(conv.payload, conv.key, *operands, *tail)
    with pytest.raises(RuntimeError, match=message):
        ops.tensor_product_double_backward(conv.payload, conv.key, *operands, o.x, o.y, o.w, *tail)


def test_packed_index_that_is_filled_with_another_is_looked_at_again(device):
    conv = TensorProductConv(SPEC).to(device)
    graph, other = Graph(*random_edges(6, 6, 30, device), 6), Graph(*random_edges(7, 5, 30, device), 7, 5)
    o, p = random_operands(SPEC, 6, 30, device=device), random_operands(SPEC, 7, 30, num_senders=5, device=device)
    index = graph.index.clone()
    assert torch.equal(conv(o.x, o.y, o.w, index), conv.convolve(o.x, o.y, o.w, graph))
    index.copy_(other.index)
    with pytest.raises(OperandError, match="built for 6 receivers"):
        conv(o.x, o.y, o.w, index)
    assert torch.equal(conv(p.x, p.y, p.w, index, 7), conv.convolve(p.x, p.y, p.w, other))
    with torch.inference_mode():
        inside = graph.index.clone()
        conv(o.x, o.y, o.w, inside)
        inside.copy_(other.index)
        with pytest.raises(OperandError, match="built for 6 receivers"):
            conv(o.x, o.y, o.w, inside)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_over_graphs(device):
    edges = torch.stack([torch.stack(random_edges(6, 6, 30, device, seed=seed)) for seed in range(3)])
    expected = torch.stack([Graph.from_edge_index(e, 6).index for e in edges])
    with sorting_scope():
        assert torch.equal(torch.vmap(lambda e: packed_index(e, 6, 6))(edges), expected)
    assert torch.equal(torch.vmap(lambda e: Graph.from_edge_index(e, 6).index)(edges), expected)
    with pytest.raises(GraphError, match="'receiver' must hold values from 0 to 2"):
        torch.vmap(lambda e: packed_index(e, 3, 6))(edges.cpu())


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu():
    device = torch.device("cuda")
    edges = torch.stack(random_edges(6, 6, 30, device))
    conv, o = TensorProductConv(SPEC).to(device), random_operands(SPEC, 6, 30, device=device)
    scripted, x = torch.jit.script(conv), o.x.clone().requires_grad_()
    copied = Graph.from_edge_index(edges, 6).index.clone()

    def step(index):
        for program in (conv, scripted):
            (gx,) = torch.autograd.grad(program(x, o.y, o.w, index).square().sum(), x, create_graph=True)
            torch.autograd.grad(gx.square().sum(), x)

    step(copied)  # the first call reads what the copy was built for
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(copied)
        step(Graph.from_edge_index(edges, 6).index)
        step(edges)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("receivers", [6, 7])
def test_a_captured_call_checks_an_index_that_it_cannot_read(receivers, tmp_path):
    """The device stops for good then, so that is tried in another process."""
    script = f"""
import torch
from eqaccel import Graph, TensorProductConv, TensorProductSpec
conv = TensorProductConv(TensorProductSpec.channelwise("2x0e", "0e", "0e")).cuda()
edges = torch.randint(5, (2, 30), device="cuda")
x, y, w = torch.randn(6, 2).cuda(), torch.randn(30, 1).cuda(), torch.randn(30, 2).cuda()
expected = conv(x, y, w, edges, 6)
index = Graph(edges[1], edges[0], {receivers}, 12 - {receivers}).index.clone()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    z = conv(x, y, w, index, 6)
graph.replay()
torch.cuda.synchronize()
print("equal" if torch.equal(z, expected) else "different")
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    if receivers == 6:
        assert found.stdout == "equal\n", found.stderr
    else:
        assert found.returncode != 0
        assert not found.stdout
        assert "assert" in found.stderr

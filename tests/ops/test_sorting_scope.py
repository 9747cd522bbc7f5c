"""Sorting scopes: what layers share inside of one, and that nothing is remembered longer."""

import gc
import threading
import weakref
from contextlib import nullcontext
from multiprocessing import shared_memory

import pytest
import torch

from eqaccel import Graph
from eqaccel.ops.graph import packed_index, packed_rows, sorting_scope

NODES = 6


def random_edges(device="cpu", rows=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(NODES, (rows, 30), generator=generator).to(device)


def mace_like(edges):
    """As a MACE model calls its layers: the edge index, with senders in row 0."""
    return packed_index(edges, NODES, NODES)


def nequip_like(edges):
    """As a NequIP model calls its layers: rows that it takes anew for each layer, senders in row 0 here as well."""
    return packed_rows(edges[1], edges[0], NODES, NODES)


def through_numpy(edges, other):
    edges.numpy()[:] = other.numpy()


def through_dlpack(edges, other):
    torch.from_dlpack(edges).copy_(other)


def through_data(edges, other):
    edges.data.copy_(other)


def index_of(edges):
    return Graph.from_edge_index(edges, NODES).index


@pytest.mark.parametrize("scope", [sorting_scope, nullcontext])
@pytest.mark.parametrize("layer", [mace_like, nequip_like])
def test_edges_refilled_between_calls_are_sorted_again(layer, scope, device):
    for refill in (through_dlpack, through_data, *([through_numpy] if device.type == "cpu" else [])):
        edges, other = random_edges(device), random_edges(device, seed=1)
        with scope():
            assert torch.equal(layer(edges), index_of(edges))
        refill(edges, other)
        with scope():
            assert torch.equal(layer(edges), index_of(other)), refill


@pytest.mark.parametrize("scope", [sorting_scope, nullcontext])
@pytest.mark.parametrize("layer", [mace_like, nequip_like])
def test_edges_in_shared_memory_are_sorted_again(layer, scope):
    other = random_edges(seed=1)
    memory = shared_memory.SharedMemory(create=True, size=other.nbytes)
    try:
        # As two processes see one block of memory: two mappings of it.
        ours, theirs = memory, shared_memory.SharedMemory(memory.name)
        edges = torch.frombuffer(ours.buf, dtype=torch.int64, count=other.numel()).view(2, -1)
        alias = torch.frombuffer(theirs.buf, dtype=torch.int64, count=other.numel()).view(2, -1)
        edges.copy_(random_edges())
        with scope():
            assert torch.equal(layer(edges), index_of(random_edges()))
        alias.copy_(other)
        with scope():
            assert torch.equal(layer(edges), index_of(other))
        del edges, alias
        gc.collect()
        theirs.close()
    finally:
        memory.close()
        memory.unlink()


@pytest.mark.parametrize("layer", [mace_like, nequip_like])
def test_layers_share_one_sort(layer, device):
    edges = random_edges(device)
    with sorting_scope():
        assert layer(edges) is layer(edges)
    assert layer(edges) is not layer(edges)


def test_other_rows_and_numbers_are_sorted_for_themselves(device):
    edges = random_edges(device, rows=4)
    with sorting_scope():
        first = packed_rows(edges[0], edges[1], NODES, NODES)
        assert packed_rows(edges[0], edges[1], NODES + 1, NODES) is not first
        for receiver, sender in ((edges[1], edges[0]), (edges[2], edges[3]), (edges[0, ::2], edges[1, ::2])):
            expected = Graph(receiver, sender, NODES).index
            assert torch.equal(packed_rows(receiver, sender, NODES, NODES), expected)
        assert torch.equal(packed_rows(edges[0].int(), edges[1].int(), NODES, NODES), first)


@pytest.mark.parametrize("layer", [mace_like, nequip_like])
def test_edges_modified_between_layers_are_sorted_again(layer, device):
    edges, other = random_edges(device), random_edges(device, seed=1)
    with sorting_scope():
        layer(edges)
        edges.copy_(other)
        assert torch.equal(layer(edges), index_of(other))


@pytest.mark.parametrize("refill", [through_numpy, through_dlpack, through_data])
def test_a_cpu_notices_a_refill_between_layers(refill):
    edges, other = random_edges(), random_edges(seed=1)
    with sorting_scope():
        mace_like(edges)
        refill(edges, other)
        assert torch.equal(mace_like(edges), index_of(other))


def test_edges_made_under_inference_mode(device):
    with torch.inference_mode(), sorting_scope():
        edges, other = random_edges(device), random_edges(device, seed=1)
        assert (mace_like(edges) is mace_like(edges)) == (device.type == "cpu")
        edges.copy_(other)
        assert torch.equal(mace_like(edges), index_of(other))


def test_addresses_that_are_used_again(device):
    with sorting_scope():
        for seed in range(20):
            edges = random_edges(device, seed=seed)
            assert torch.equal(nequip_like(edges), index_of(edges))
            del edges


def test_a_scope_forgets_at_its_end():
    edges, seen = random_edges(), []

    def fail():
        with sorting_scope():
            seen.append(weakref.ref(mace_like(edges)))
            assert seen[0]() is mace_like(edges)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert seen[0]() is None
    assert mace_like(edges) is not mace_like(edges)


def test_an_inner_scope_starts_empty():
    edges = random_edges()
    with sorting_scope():
        outer = mace_like(edges)
        with sorting_scope():
            inner = mace_like(edges)
            assert inner is not outer
            assert inner is mace_like(edges)
        assert mace_like(edges) is outer


def test_a_scope_belongs_to_its_thread():
    edges, seen = random_edges(), []
    barrier = threading.Barrier(2, timeout=60)

    def work():
        barrier.wait()
        seen.append(mace_like(edges) is mace_like(edges))  # in no scope
        with sorting_scope():
            seen.append(mace_like(edges))
        barrier.wait()

    thread = threading.Thread(target=work)
    thread.start()
    with sorting_scope():
        first = mace_like(edges)
        barrier.wait()
        barrier.wait()
        assert mace_like(edges) is first
    thread.join()
    assert seen[0] is False
    assert seen[1] is not first


def test_a_scope_does_nothing_while_tracing(device):
    edges, other = random_edges(device), random_edges(device, seed=1)

    def two_layers(edges):
        with sorting_scope():
            return mace_like(edges), mace_like(edges)

    with sorting_scope():
        mace_like(edges)
        traced = torch.fx.experimental.proxy_tensor.make_fx(two_layers)(edges)
    assert len(traced.graph.find_nodes(op="call_function", target=torch.ops.eqaccel.graph.default)) == 2
    for function in (traced, torch.jit.trace(two_layers, (edges,), check_trace=False)):
        for index in function(other):
            assert torch.equal(index, index_of(other))


def test_a_scope_compiles():
    def two_layers(edges):
        with sorting_scope():
            return mace_like(edges), mace_like(edges)

    compiled = torch.compile(two_layers, backend="aot_eager", fullgraph=True)
    for seed in range(2):
        edges = random_edges(seed=seed)
        with sorting_scope():
            for index in compiled(edges):
                assert torch.equal(index, index_of(edges))


@pytest.mark.gpu
def test_streams_sort_for_themselves_and_capture_records_every_sort():
    edges, other = random_edges("cuda"), random_edges("cuda", seed=1)
    with sorting_scope():
        first = mace_like(edges)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            assert mace_like(edges) is not first
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            index = mace_like(edges)
    edges.copy_(other)
    graph.replay()
    assert torch.equal(index, index_of(other))

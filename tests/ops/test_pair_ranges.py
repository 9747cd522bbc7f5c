"""Pairs in ranges, each of which is a graph of its own, and convolutions over one range after another."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from pair_problems import CASES, MISSING, SPEC, WEIGHTS, Problem, case_in_slots, exact, of_pairs
from torch import Tensor

from eqaccel.errors import OperandError
from eqaccel.ops import (
    EdgePairs,
    EdgeWeights,
    Graph,
    MemoryLimits,
    Portions,
    TensorProductConv,
    convolve_in_pieces,
    convolve_pairs,
    depend_on_lengths,
    given_edges,
)
from eqaccel.ops.layout import to_ir_mul, to_mul_ir
from eqaccel.ops.library import call_operator
from eqaccel.ops.portions import UNLIMITED
from eqaccel.testing import assert_close


@dataclass(frozen=True)
class Range:
    """Some pairs that follow each other, with all of their edges, numbered from the first."""

    first: int
    slots: Tensor
    row: Tensor
    edges: Tensor
    index: Tensor


def ranges_of(pairs: EdgePairs, index: Tensor, num_nodes: int, size: int) -> list[Range]:
    arguments = index, pairs.row, pairs.edges, num_nodes, size, pairs.all_reversible
    found = call_operator(torch.ops.eqaccel.pair_ranges, *arguments)
    parts = zip(*[iter(tensor.cpu() for tensor in found)] * 4, strict=True)
    return [Range(n * size, *part) for n, part in enumerate(parts)]


@pytest.mark.parametrize("size", [1, 3, 50, 10_000])
@pytest.mark.parametrize("name", [*CASES, "nothing"])
def test_ranges_of_pairs_are_graphs(name: str, size: int, device: torch.device) -> None:
    num_atoms, (receiver, sender, vectors) = case_in_slots(name, torch.float64)
    index = Graph(receiver, sender, num_atoms, num_atoms).index
    pairs = EdgePairs.find(vectors, index, num_atoms)
    there = replace(pairs, row=pairs.row.to(device), edges=pairs.edges.to(device))
    ranges = ranges_of(there, index.to(device), num_atoms, size)
    assert len(ranges) == -(-len(pairs.edges) // size)
    for part in ranges:
        own = Graph(receiver[part.slots], sender[part.slots], num_atoms, num_atoms)
        assert own.is_sorted
        assert torch.equal(part.index, own.index)
        assert torch.equal(part.row + part.first, pairs.row[part.slots])
        members, there = pairs.edges[part.first : part.first + len(part.edges)], part.edges >= 0
        assert torch.equal(part.slots[part.edges[there].long()], members[there].long())
        assert torch.equal(part.edges[~there], members[~there])
        # A range is divided like a whole graph.
        whole = replace(pairs, row=part.row.to(device), edges=part.edges.to(device))
        for finer in ranges_of(whole, part.index.to(device), num_atoms, 2):
            of_all = part.slots[finer.slots]
            assert torch.equal(finer.index, Graph(receiver[of_all], sender[of_all], num_atoms, num_atoms).index)
            assert torch.equal(finer.row + part.first + finer.first, pairs.row[of_all])
    slots = torch.cat([part.slots for part in ranges]) if ranges else torch.zeros(0, dtype=torch.int64)
    assert torch.equal(slots.sort().values, torch.arange(len(receiver)))


SPARE, ROOM = 3, 31
"""Nodes and edges for which there is only room."""


def with_room(graph: Graph, pairs: EdgePairs, num_atoms: int) -> tuple[Tensor, EdgePairs]:
    """As on a GPU: behind the last edge there are others, between nodes of their own, in no pair and no row."""
    count = len(graph.edge)
    beyond = torch.arange(count, count + ROOM, dtype=torch.int32)

    def whole(row_ptr: Tensor, of_edges: Tensor, of_others: Tensor) -> Tensor:
        return torch.cat([row_ptr, row_ptr[-1:].expand(SPARE), of_edges, of_others])

    rows = [
        whole(graph.row_ptr, graph.edge, beyond),
        graph.sender,
        num_atoms + beyond % SPARE,
        whole(graph.t_row_ptr, graph.t_slot, beyond),
    ]
    index = torch.cat([torch.tensor([num_atoms + SPARE] * 2, dtype=torch.int32), *rows])
    others = torch.arange(len(pairs.edges), (count + ROOM + 1) // 2, dtype=torch.int32)
    members = torch.cat([pairs.edges, torch.stack([others, torch.full_like(others, -2)], 1)])
    row = torch.cat([pairs.row, torch.zeros_like(beyond)])
    return index, EdgePairs(row, members, pairs.differ, all_reversible=True)


@pytest.mark.parametrize("size", [1, 7, 40, 10_000])
def test_ranges_leave_room_to_the_end(size: int) -> None:
    """And so do ranges of ranges."""
    num_atoms, (receiver, sender, vectors) = case_in_slots("crystal", torch.float64)
    graph, count = Graph(receiver, sender, num_atoms, num_atoms), len(receiver)
    pairs = EdgePairs.find(vectors, graph.index, num_atoms)
    index, roomy = with_room(graph, pairs, num_atoms)
    nodes, room = num_atoms + SPARE, count + ROOM
    with pytest.raises(OperandError, match=f"expected {room} edges that nodes receive, got {count}"):
        ranges_of(replace(roomy, all_reversible=False), index, nodes, size)

    plain, ranges = ranges_of(pairs, graph.index, num_atoms, size), ranges_of(roomy, index, nodes, size)
    assert sum(len(part.slots) for part in ranges) == room
    assert_same_but_for_room(ranges, plain, num_atoms, count)
    for number, part in enumerate(ranges):
        finer = ranges_of(replace(roomy, row=part.row, edges=part.edges), part.index, nodes, 3)
        assert sum(len(own.slots) for own in finer) == len(part.slots)
        if number >= len(plain):
            assert_same_but_for_room(finer, [], num_atoms, 0)
            continue
        own = plain[number]
        expected = ranges_of(replace(pairs, row=own.row, edges=own.edges), own.index, num_atoms, 3)
        assert_same_but_for_room(finer, expected, num_atoms, len(own.slots))


def assert_same_but_for_room(ranges: list[Range], exact: list[Range], num_atoms: int, count: int) -> None:
    """Ranges of a graph with room are those of the graph without it, which has so many edges."""
    nodes = num_atoms + SPARE
    for number, part in enumerate(ranges):
        edges = len(part.slots)
        sizes = [2, nodes + 1, edges, edges, nodes + 1, edges]
        head, row_ptr, edge, senders, t_row_ptr, t_slot = part.index.split(sizes)
        here, known = (0, 0) if number >= len(exact) else (len(exact[number].slots), len(exact[number].edges))
        assert head.tolist() == [nodes, nodes]
        assert torch.equal(edge, torch.arange(edges, dtype=torch.int32))
        assert torch.equal(row_ptr[num_atoms:], torch.full((SPARE + 1,), here, dtype=torch.int32))
        assert torch.equal(t_row_ptr, row_ptr)
        assert bool((part.slots[here:] >= count).all())
        assert bool((senders[here:] >= num_atoms).all())
        assert torch.equal(t_slot.sort().values, edge)
        assert bool(((part.row >= 0) & (part.row < len(part.edges))).all())
        assert bool((part.edges[known:, 1] == -2).all())
        if here:
            own = exact[number]
            found = (part.slots, senders, t_slot, part.row, part.edges)
            parts = own.index.split([2, num_atoms + 1, here, here, num_atoms + 1, here])
            expected = (own.slots, parts[3], parts[5], own.row, own.edges)
            assert torch.equal(row_ptr[: num_atoms + 1], parts[1])
            assert all(torch.equal(a[: len(b)], b) for a, b in zip(found, expected, strict=True))
        else:
            assert not bool(row_ptr.any())


@pytest.mark.parametrize("size", [1, 7, 40, 10_000])
def test_ranges_of_a_graph_without_room_stay_in_bounds(size: int) -> None:
    """Where not all edges found room, some that did have a reverse that did not, and are in no pair."""
    num_atoms, (receiver, sender, vectors) = case_in_slots("crystal", torch.float64)
    pairs = EdgePairs.find(vectors, Graph(receiver, sender, num_atoms, num_atoms).index, num_atoms)
    room = len(receiver) * 2 // 3 + 1
    index = Graph(receiver[:room], sender[:room], num_atoms, num_atoms).index
    whole = pairs.edges[(pairs.edges < room).all(1)]
    row = torch.zeros(room, dtype=torch.int32)
    row[whole.long()] = torch.arange(len(whole), dtype=torch.int32).unsqueeze(1).expand(-1, 2)
    others = torch.arange(len(whole), (room + 1) // 2, dtype=torch.int32)
    members = torch.cat([whole, torch.stack([others, torch.full_like(others, -2)], 1)])
    assert len(others) > 5
    for part in ranges_of(EdgePairs(row, members, pairs.differ, all_reversible=True), index, num_atoms, size):
        edges = len(part.slots)
        sizes = [2, num_atoms + 1, edges, edges, num_atoms + 1, edges]
        _, row_ptr, _, senders, t_row_ptr, t_slot = part.index.split(sizes)
        for values, least, end in (
            (part.slots, 0, room),
            (part.row, 0, len(part.edges)),
            (part.edges, -2, edges),
            (row_ptr, 0, edges + 1),
            (t_row_ptr, 0, edges + 1),
            (row_ptr.diff(), 0, edges + 1),
            (t_row_ptr.diff(), 0, edges + 1),
            (senders, 0, num_atoms),
            (t_slot, 0, edges),
        ):
            assert bool(((values >= least) & (values < end)).all())


@pytest.mark.parametrize("terms", [9, 12])  # of four, GPUs add up portions as they come
@pytest.mark.parametrize(("ranges", "portions"), [(1, 1), (1, 2), (1, 1000), (2, 1), (5, 3), (1000, 5)])
@pytest.mark.parametrize("name", ["crystal", "own images", *MISSING, "empty"])
def test_a_convolution_in_portions(
    name: str, ranges: int, portions: int, terms: int, dtype: torch.dtype, device: torch.device
) -> None:
    problem = Problem(name, dtype, device, in_slots=True, terms=terms)
    row_bytes, count = WEIGHTS * dtype.itemsize, len(problem.receiver)
    limits = MemoryLimits(
        pairs=max(1, len(problem.pairs.edges)) * row_bytes / ranges,
        gradients=max(1, count) * row_bytes / (ranges * portions if portions > 1 else 1),
    )

    def computed(conv: TensorProductConv, x: Tensor, gz: Tensor, limits: MemoryLimits = UNLIMITED) -> list[Tensor]:
        leaf, (_, y, inputs) = x.clone().requires_grad_(True), problem.leaves()
        given = problem.given(pairs=problem.pairs, limits=limits)
        with given_edges(given):
            depend_on_lengths(inputs)
            weights = EdgeWeights(problem.weights, inputs, last=problem.last)
            z = convolve_in_pieces(conv, leaf, y, weights, problem.receiver, problem.sender)
        assert bool(given.shared)
        results = of_pairs(problem, [z.detach(), *torch.autograd.grad(z, [leaf, y, inputs], gz)])
        can_be_less = ranges > 1 and len(problem.pairs.edges) > 1
        assert bool(given.portions.range_indices) == (limits != UNLIMITED and can_be_less)
        return results

    operands = problem.conv, problem.x, problem.gz
    whole, found, again = computed(*operands), computed(*operands, limits), computed(*operands, limits)
    assert all(map(torch.equal, found, again))
    for results in (whole, found):
        assert_close(results, exact(problem, absolute=False), exact(problem, absolute=True))
    if device.type == "cpu":
        assert torch.equal(found[2], whole[2])  # of each edge for itself
        assert portions > 1 or torch.equal(found[3], whole[3])  # and of each pair
        assert ranges > 1 or torch.equal(found[0], whole[0])
    x, gz = to_ir_mul(problem.x, SPEC.irreps_in1), to_ir_mul(problem.gz, SPEC.irreps_out)
    other = computed(TensorProductConv(SPEC, layout="ir_mul").to(device), x, gz, limits)
    for result, irreps in ((0, SPEC.irreps_out), (1, SPEC.irreps_in1)):
        other[result] = to_mul_ir(other[result], irreps)
    assert_close(other, exact(problem, absolute=False), exact(problem, absolute=True))
    if device.type == "cpu":  # whose kernels work in that layout
        assert ranges * portions == 1 or all(map(torch.equal, found, other))


@pytest.mark.parametrize(("pair_rows", "gradient_rows"), [(1000, 60), (1000, 1), (60, 30), (41, 1000), (1, 1)])
def test_room_adds_nothing_in_portions(pair_rows: int, gradient_rows: int, dtype: torch.dtype) -> None:
    problem = Problem("crystal", dtype, in_slots=True)
    graph, row_bytes = (
        Graph(problem.receiver, problem.sender, problem.num_atoms, problem.num_atoms),
        WEIGHTS * dtype.itemsize,
    )
    index, roomy = with_room(graph, problem.pairs, problem.num_atoms)
    atoms, edges, pairs = problem.num_atoms, len(problem.y), len(problem.pairs.edges)
    rows = problem.inputs[problem.pairs.edges[:, 0].long()]

    def computed(portions: Portions, *given: Tensor) -> list[Tensor]:
        *leaves, gz = (t.clone().requires_grad_(True) for t in given)
        z = convolve_pairs(problem.conv, *leaves[:2], problem.last, leaves[2], portions)
        return [z.detach(), *torch.autograd.grad(z, leaves, gz)]

    def more(values: Tensor, count: int) -> Tensor:
        return torch.cat([values, torch.randn(count, values.size(1), dtype=dtype)])

    bounded = Portions(roomy, index, MemoryLimits(pair_rows * row_bytes, gradient_rows * row_bytes))
    others = (
        more(problem.x, SPARE),
        more(problem.y, ROOM),
        more(rows, len(roomy.edges) - pairs),
        more(problem.gz, SPARE),
    )
    found = computed(bounded, *others)
    assert bool(bounded.range_indices) == (pair_rows < len(roomy.edges))
    assert not bool(found[3][pairs:].any())
    found = [t[:count] for t, count in zip(found, (atoms, atoms, edges, pairs), strict=True)]
    whole = computed(Portions(problem.pairs, problem.index), problem.x, problem.y, rows, problem.gz)
    assert torch.equal(found[2], whole[2])
    assert gradient_rows < len(roomy.row) or torch.equal(found[3], whole[3])
    assert_close(found, exact(problem, absolute=False), exact(problem, absolute=True))

"""Edges and their reverses: which they are in any graph, and convolutions that make weights once for both."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from small_cells import Edges, chosen, edges_of, received_by
from torch import Tensor

from eqaccel import TensorProductSpec
from eqaccel.errors import OperandError
from eqaccel.ops import (
    EdgePairs,
    EdgeWeights,
    GivenEdges,
    Graph,
    LastProduct,
    MatrixProduct,
    Neighbors,
    Portions,
    TensorProductConv,
    convolve_in_pieces,
    convolve_pairs,
    depend_on_lengths,
    given_edges,
)
from eqaccel.ops.layout import to_ir_mul, to_mul_ir
from eqaccel.ops.library import call_operator
from eqaccel.testing import assert_close, derivatives, reference


def case(name: str, dtype: torch.dtype) -> tuple[int, Edges]:
    torch.manual_seed(0)
    num_atoms = {"own images": 1, "empty": 3, "nothing": 0, "two": 2}.get(name, 7)
    if num_atoms == 0 or name == "empty":
        none = torch.zeros(0, dtype=torch.int64)
        return num_atoms, (none, none, torch.zeros(0, 3, dtype=dtype))
    edges = edges_of(num_atoms, dtype)
    if name == "ghosts":
        edges = received_by(range(4), edges)
    count = len(edges[0])
    if name in ("shuffled", "some missing", "twice", "zeros"):
        edges = chosen(edges, torch.randperm(count))
    if name == "some missing":
        edges = chosen(edges, torch.rand(count) < 0.7)
    elif name == "one missing":
        edges = chosen(edges, torch.arange(count) != 5)
    elif name == "twice":
        edges = chosen(edges, torch.cat([torch.arange(count), torch.randint(count, (count // 2,))]))
    elif name == "zeros":  # atoms at one place, an atom and itself, and numbers that equal nothing
        edges[2][:20] = torch.tensor([0.0, -0.0, 0.0], dtype=dtype)
        edges[2][20:30] = torch.nan
    elif name == "nearly":
        edges[2][3, 1] = torch.nextafter(edges[2][3, 1], torch.tensor(9.0, dtype=dtype))
    return num_atoms, edges


def case_in_slots(name: str, dtype: torch.dtype) -> tuple[int, Edges]:
    """A case whose edges come in the order of slots, as those of a step do."""
    num_atoms, edges = case(name, dtype)
    return num_atoms, chosen(edges, Graph(edges[0], edges[1], num_atoms, num_atoms).edge.long())


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


MISSING = ["some missing", "one missing", "ghosts"]
CASES = ["crystal", "own images", "two", "shuffled", *MISSING, "twice", "zeros", "nearly", "empty"]


@pytest.mark.parametrize("name", [*CASES, "nothing"])
def test_pairs_of_any_graph(name: str, dtype: torch.dtype) -> None:
    num_atoms, (receiver, sender, vectors) = case(name, dtype)
    index = Graph(receiver, sender, num_atoms, num_atoms).index
    pairs = EdgePairs.find(vectors, index, num_atoms)
    members = pairs.edges.tolist()
    rows: list[list[int]] = [[] for _ in members]
    for edge, row in enumerate(pairs.row.tolist()):
        rows[row].append(edge)
    assert [sorted(row) for row in rows] == [sorted(edge for edge in row if edge >= 0) for row in members]
    for first, second in members:
        if second >= 0:
            assert (receiver[first], sender[first]) == (sender[second], receiver[second])
            assert torch.equal(vectors[first], -vectors[second])
    # As many as there can be; nothing is the reverse of NaN.
    ends = list(zip(receiver.tolist(), sender.tolist(), map(tuple, (vectors + 0.0).tolist()), strict=True))
    there = Counter(end for end in ends if end[2] == end[2])
    reverse = {end: (end[1], end[0], tuple(0.0 - v for v in end[2])) for end in there}
    matched = sum(n // 2 * 2 if end == reverse[end] else min(n, there[reverse[end]]) for end, n in there.items())
    assert len(members) == len(ends) - matched // 2
    again = [EdgePairs.find(vectors, index, num_atoms) for _ in range(2)]
    assert all(torch.equal(found.row, pairs.row) and torch.equal(found.edges, pairs.edges) for found in again)
    if name in ("crystal", "own images", "two", "shuffled"):
        assert 2 * len(members) == len(ends) > 0
    if name == "ghosts":
        assert torch.equal(pairs.edges[:, 1] < 0, sender[pairs.edges[:, 0].long()] >= 4)
    if name in ("one missing", "nearly", "ghosts"):
        assert 2 * len(members) > len(ends)


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


@pytest.mark.parametrize("size", [1, 7, 40, 10_000])
def test_ranges_leave_room_to_the_end(size: int) -> None:
    """As on a GPU: behind the last edge there are others, between nodes of their own, in no pair and no row."""
    num_atoms, (receiver, sender, vectors) = case_in_slots("crystal", torch.float64)
    graph = Graph(receiver, sender, num_atoms, num_atoms)
    pairs = EdgePairs.find(vectors, graph.index, num_atoms)
    count, spare, room = len(receiver), 3, len(receiver) + 31
    nodes, beyond = num_atoms + spare, torch.arange(count, room, dtype=torch.int32)

    def whole(row_ptr: Tensor, of_edges: Tensor, of_others: Tensor) -> Tensor:
        return torch.cat([row_ptr, row_ptr[-1:].expand(spare), of_edges, of_others])

    rows = [
        whole(graph.row_ptr, graph.edge, beyond),
        graph.sender,
        num_atoms + beyond % spare,
        whole(graph.t_row_ptr, graph.t_slot, beyond),
    ]
    index = torch.cat([torch.tensor([nodes, nodes], dtype=torch.int32), *rows])
    others = torch.arange(len(pairs.edges), (room + 1) // 2, dtype=torch.int32)
    members = torch.cat([pairs.edges, torch.stack([others, torch.full_like(others, -2)], 1)])
    rows_of_edges = torch.cat([pairs.row, torch.zeros_like(beyond)])
    roomy = EdgePairs(rows_of_edges, members, pairs.differ, all_reversible=True)
    with pytest.raises(OperandError, match=f"expected {room} edges that nodes receive, got {count}"):
        ranges_of(replace(roomy, all_reversible=False), index, nodes, size)

    exact, ranges = ranges_of(pairs, graph.index, num_atoms, size), ranges_of(roomy, index, nodes, size)
    assert sum(len(part.slots) for part in ranges) == room
    for number, part in enumerate(ranges):
        edges = len(part.slots)
        sizes = [2, nodes + 1, edges, edges, nodes + 1, edges]
        head, row_ptr, edge, senders, t_row_ptr, t_slot = part.index.split(sizes)
        here, known = (0, 0) if number >= len(exact) else (len(exact[number].slots), len(exact[number].edges))
        assert head.tolist() == [nodes, nodes]
        assert torch.equal(edge, torch.arange(edges, dtype=torch.int32))
        assert torch.equal(row_ptr[num_atoms:], torch.full((spare + 1,), here, dtype=torch.int32))
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


SPEC = TensorProductSpec.channelwise("5x0e+5x1o", "1x0e+1x1o", "5x0e+5x1o")
WEIGHTS, TERMS, INPUTS = SPEC.weight_numel, 9, 3


class Problem:
    """A convolution whose weights are (inputs first)^2 second, with inputs that are the same for pairs.

    What is computed for a row does not depend on how many there are.
    """

    def __init__(
        self, name: str, dtype: torch.dtype, device: torch.device | str = "cpu", *, in_slots: bool = False
    ) -> None:
        self.num_atoms, (receiver, sender, vectors) = (case_in_slots if in_slots else case)(name, dtype)
        index = Graph(receiver, sender, self.num_atoms, self.num_atoms).index
        self.pairs = EdgePairs.find(vectors, index, self.num_atoms)
        self.receiver, self.sender, self.index = receiver.to(device), sender.to(device), index.to(device)
        if self.index.is_cuda:
            members, all_reversible = self.pairs.edges, bool((self.pairs.edges >= 0).all())
            if all_reversible or not in_slots:  # there is room for more pairs than there are
                members = torch.cat([members, torch.tensor([[0, -2], [0, -2]], dtype=torch.int32)[: len(vectors)]])
            of_gpu = [t.to(device) for t in (self.pairs.row, members, self.pairs.differ)]
            self.pairs = EdgePairs(*of_gpu, Neighbors().to(device), all_reversible)
        torch.manual_seed(1)
        edges, made = len(vectors), {"dtype": dtype, "device": device}
        self.conv, product = TensorProductConv(SPEC).to(device), MatrixProduct().to(device)
        self.x, self.y = torch.randn(self.num_atoms, SPEC.x_dim, **made), torch.randn(edges, SPEC.y_dim, **made)
        self.inputs = torch.randn(len(self.pairs.edges), INPUTS, **made)[self.pairs.row.long()]
        self.gz = torch.randn(self.num_atoms, SPEC.z_dim, **made)
        self.first, self.second = torch.randn(INPUTS, TERMS, **made), torch.randn(TERMS, WEIGHTS, **made)
        self.hidden = lambda rows: product(rows, self.first).square()
        self.last = LastProduct(self.hidden, product, self.second)

    def weights(self, rows: Tensor) -> Tensor:
        return self.last.product(self.hidden(rows), self.second)

    def leaves(self) -> list[Tensor]:
        return [t.clone().requires_grad_(True) for t in (self.x, self.y, self.inputs)]

    def given(self, **options: object) -> GivenEdges:
        return GivenEdges(torch.stack([self.sender, self.receiver]), self.index, self.num_atoms, **options)


@pytest.mark.parametrize("name", ["crystal", "own images", "one missing", "ghosts", "twice", "empty"])
def test_a_convolution_with_weights_of_pairs(name: str, dtype: torch.dtype, device: torch.device) -> None:
    if device.type == "cuda" and name == "twice":
        pytest.skip("kernels of GPUs share weights of edges that are in the order of slots")
    problem = Problem(name, dtype, device)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        x, y, inputs = problem.leaves()
        rows = problem.pairs.rows_of(inputs, problem.pairs.differ)
        hidden: list[Tensor] = []

        def keep(values: Tensor, hidden: list[Tensor] = hidden) -> Tensor:
            hidden.append(problem.hidden(values))
            return hidden[0]

        last = LastProduct(keep, problem.last.product, problem.second)
        z = convolve_pairs(problem.conv, x, y, last, rows, Portions(problem.pairs, problem.index))
        results.append((z.detach(), *torch.autograd.grad(z, [x, y, hidden[0], inputs], problem.gz)))
    torch.set_num_threads(1)
    assert all(map(torch.equal, *results))

    z, gx, gy, gh, ginputs = results[0]
    x, y, inputs = problem.leaves()
    weights = problem.weights(rows.detach())[problem.pairs.row.long()].requires_grad_(True)
    expected = problem.conv(x, y, weights, problem.index)
    own = torch.autograd.grad(expected, [x, y, weights], problem.gz)
    # The same sums in the same order, of the same weights.
    assert torch.equal(z, expected)
    assert torch.equal(gx, own[0])
    assert torch.equal(gy, own[1])
    # A gradient of a pair is a sum over weights, of sums of two: so many terms on either way.
    sums = torch.zeros_like(gh).index_add_(0, problem.pairs.row.long(), own[2] @ problem.second.t())
    size = torch.zeros_like(gh).index_add_(0, problem.pairs.row.long(), own[2].abs() @ problem.second.t().abs())
    assert bool(((gh - sums).abs() <= 2 * (WEIGHTS + 2) * torch.finfo(dtype).eps * size).all())
    # All of it goes to the first edge of a pair.
    second = problem.pairs.edges[:, 1]
    assert bool((ginputs[second[second >= 0].long()] == 0).all())


def exact(problem: Problem, *, absolute: bool) -> list[Tensor]:
    """What a convolution and its gradients are in float64, or the sums of absolute values that belong to them."""

    def prepared(t: Tensor) -> Tensor:
        return t.double().abs() if absolute else t.double()

    first, second = prepared(problem.first), prepared(problem.second)
    edges = torch.stack([problem.sender, problem.receiver])

    def define(x: Tensor, y: Tensor, inputs: Tensor) -> Tensor:
        weights = (inputs @ first).square() @ second
        return reference(SPEC, x, y, weights, edges, problem.num_atoms, absolute=absolute)

    operands = [prepared(t) for t in (problem.x, problem.y, problem.inputs)]
    return of_pairs(problem, derivatives(define, operands, [[prepared(problem.gz)]]))


def of_pairs(problem: Problem, results: list[Tensor]) -> list[Tensor]:
    """Results whose last one is added up over the edges of each pair."""
    last = results[-1]
    sums = last.new_zeros(len(problem.pairs.edges), last.size(1))
    return [*results[:-1], sums.index_add_(0, problem.pairs.row.long(), last)]


@pytest.mark.parametrize(("ranges", "portions"), [(1, 1), (1, 2), (1, 1000), (2, 1), (5, 3), (1000, 5)])
@pytest.mark.parametrize("name", ["crystal", "own images", *MISSING, "empty"])
def test_a_convolution_in_portions(
    name: str, ranges: int, portions: int, dtype: torch.dtype, device: torch.device
) -> None:
    problem = Problem(name, dtype, device, in_slots=True)
    row_bytes, count = WEIGHTS * dtype.itemsize, len(problem.receiver)
    bounds = {
        "pair_bytes": max(1, len(problem.pairs.edges)) * row_bytes / ranges,
        "gradient_bytes": max(1, count) * row_bytes / ranges / portions,
    }

    def computed(conv: TensorProductConv, x: Tensor, gz: Tensor, **bounds: float) -> list[Tensor]:
        leaf, (_, y, inputs) = x.clone().requires_grad_(True), problem.leaves()
        given = problem.given(pairs=problem.pairs, **bounds)
        with given_edges(given):
            depend_on_lengths(inputs)
            weights = EdgeWeights(problem.weights, inputs, last=problem.last)
            z = convolve_in_pieces(conv, leaf, y, weights, problem.receiver, problem.sender)
        assert bool(given.shared)
        results = of_pairs(problem, [z.detach(), *torch.autograd.grad(z, [leaf, y, inputs], gz)])
        can_be_less = ranges * portions > 1 and len(problem.pairs.edges) > 1
        assert bool(given.portions.range_indices) == (bool(bounds) and can_be_less)
        return results

    operands = problem.conv, problem.x, problem.gz
    whole, found, again = computed(*operands), computed(*operands, **bounds), computed(*operands, **bounds)
    assert all(map(torch.equal, found, again))
    for results in (whole, found):
        assert_close(results, exact(problem, absolute=False), exact(problem, absolute=True))
    if device.type == "cpu":
        assert torch.equal(found[2], whole[2])  # of each edge for itself
        assert torch.equal(found[3], whole[3])  # and of each pair
        assert ranges > 1 or torch.equal(found[0], whole[0])
    # Kernels work in the other layout.
    x, gz = to_ir_mul(problem.x, SPEC.irreps_in1), to_ir_mul(problem.gz, SPEC.irreps_out)
    other = computed(TensorProductConv(SPEC, layout="ir_mul").to(device), x, gz, **bounds)
    for result, irreps in ((0, SPEC.irreps_out), (1, SPEC.irreps_in1)):
        other[result] = to_mul_ir(other[result], irreps)
    assert ranges * portions == 1 or all(map(torch.equal, found, other))


def test_rows_of_pairs_are_compared(dtype: torch.dtype, device: torch.device) -> None:
    """Where both have values: NaN is the same as NaN, an edge may be alone, and rows beyond the last pair are none."""
    problem = Problem("one missing", dtype, device)
    pairs, edges = problem.pairs, problem.pairs.edges.tolist()
    first, second = next(pair for pair in edges if min(pair) >= 0)
    alone = next(edge for edge, other in edges if other == -1)

    def found(edge: int, value: float, both: bool = False) -> bool:
        values = problem.inputs.clone()
        values[[edge, second] if both else edge, 1] = value
        differ = torch.zeros(1, dtype=torch.float64, device=device)
        rows = pairs.rows_of(values, differ)
        assert torch.equal(rows.nan_to_num(7.0), values.nan_to_num(7.0).index_select(0, pairs.edges[:, 0]))
        return bool(differ)

    assert not found(first, float(problem.inputs[first, 1]))
    for value in (float(problem.inputs[first, 1]) + 1.0, torch.nan, torch.inf):
        assert found(first, value)
        assert found(second, value)
        assert not found(first, value, both=True)
        assert not found(alone, value)
    other = torch.zeros(1, dtype=torch.float64, device=device)
    for wrong in (problem.inputs[1:], problem.inputs[:, 0], problem.inputs.long()):
        with pytest.raises(OperandError, match="the matrix must be"):
            pairs.rows_of(wrong, other)
    with pytest.raises(OperandError, match="differ"):
        pairs.rows_of(problem.inputs, other.float())


def test_derivatives_of_rows_of_pairs(device: torch.device) -> None:
    problem = Problem("one missing", torch.float64, device)
    flag = torch.zeros(1, dtype=torch.float64, device=device)
    _, _, inputs = problem.leaves()

    def rows(values: Tensor) -> Tensor:
        return problem.pairs.rows_of(values, flag)[: len(problem.pairs.edges) - 2]  # those behind are none

    assert torch.autograd.gradcheck(rows, (inputs,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(rows, (inputs,))


def test_pairs_are_taken_where_they_are_given(dtype: torch.dtype) -> None:
    problem = Problem("crystal", dtype)

    def computed(given: GivenEdges, noted: bool, inputs: Tensor, last: LastProduct | None) -> list[Tensor]:
        x, y, _ = problem.leaves()
        with given_edges(given):
            if noted:
                depend_on_lengths(inputs)
            weights = EdgeWeights(problem.weights, inputs, last=last)
            z = convolve_in_pieces(problem.conv, x, y, weights, problem.receiver, problem.sender)
        return [z.detach(), *torch.autograd.grad(z, [x, y], problem.gz)]

    given = problem.given(pairs=problem.pairs)
    found = computed(given, True, problem.inputs, problem.last)
    assert len(given.shared) == 1
    changed = problem.inputs.clone()
    changed[4] += 1.0  # not that of its reverse any more
    for other, noted, inputs, last in (
        (problem.given(pairs=problem.pairs), True, changed, problem.last),
        (problem.given(pairs=problem.pairs), True, problem.inputs, None),
        (problem.given(pairs=problem.pairs), False, problem.inputs, problem.last),
        (problem.given(), True, problem.inputs, problem.last),
    ):
        plain = computed(other, noted, inputs, last)
        assert not other.shared
        assert all(map(torch.equal, plain, found)) == (inputs is problem.inputs)


def test_what_does_not_fit_is_refused() -> None:
    problem = Problem("crystal", torch.float64)
    conv, pairs, ops = problem.conv, problem.pairs, torch.ops.eqaccel
    weights, rest = problem.weights(problem.inputs), (problem.num_atoms, SPEC.z_dim)
    head, tail = (conv.payload, conv.key, problem.x, problem.y), (problem.index, *rest, True, True)
    wrong = pairs.row.clone()
    wrong[3] = len(weights)
    for row in (wrong, -1 - wrong, pairs.row[1:], pairs.row.long()):
        with pytest.raises(OperandError, match="w_row"):
            call_operator(ops.tensor_product_shared, *head, weights, row, *tail)
    product = problem.last.product
    for summands in (pairs.edges + len(weights), pairs.edges - 3, pairs.edges[:, 0], pairs.edges.long()):
        with pytest.raises(OperandError, match="summands"):
            call_operator(
                ops.matrix_product_shared, product.payload, product.key, weights, problem.second.t(), summands
            )
    graph = Graph(problem.receiver.flip(0), problem.sender.flip(0), problem.num_atoms, problem.num_atoms).index
    x, rows = problem.leaves()[0], problem.inputs[pairs.edges[:, 0].long()]
    z = convolve_pairs(conv, x, problem.y, problem.last, rows, Portions(pairs, graph, gradient_bytes=1000.0))
    with pytest.raises(RuntimeError, match="in the order of slots"):
        torch.autograd.grad(z.sum(), x)
    for vectors in (problem.y, torch.zeros(3, 3, dtype=torch.int64), torch.zeros(3, 3)):
        with pytest.raises(OperandError):
            EdgePairs.find(vectors, problem.index, problem.num_atoms)
    dense = TensorProductConv(TensorProductSpec("2x0e", "1x0e", "2x0e", [(0, 0, 0, "uvw")]))
    x, y, w = (torch.ones(problem.num_atoms, 2).double(), problem.y[:, :1].contiguous(), weights[:, :4].contiguous())
    for row, members, size in (
        (pairs.row.long(), pairs.edges, 3),
        (pairs.row, pairs.edges[:, 0], 3),
        (pairs.row, pairs.edges, 0),
        (pairs.row[1:], pairs.edges, 3),
    ):
        with pytest.raises(OperandError, match="pair_ranges"):
            call_operator(ops.pair_ranges, problem.index, row, members, problem.num_atoms, size, False)
    with pytest.raises(ValueError, match="kernels without"):
        ops.tensor_product_shared(dense.payload, dense.key, x, y, w, pairs.row, problem.index, *rest[:1], 2, True, True)


def test_edges_are_let_go_at_once() -> None:
    """Nothing goes round in a circle: tensors of a step would stay until Python looks for such."""
    problem = Problem("crystal", torch.float64, in_slots=True)
    x, y, inputs = problem.leaves()
    given = problem.given(pairs=problem.pairs, pair_bytes=1000)
    with given_edges(given):
        depend_on_lengths(inputs)
        weights = EdgeWeights(problem.weights, inputs, last=problem.last)
        z = convolve_in_pieces(problem.conv, x, y, weights, problem.receiver, problem.sender)
    index = weakref.ref(given.portions.range_indices[0])
    torch.autograd.grad(z, [x, y, inputs], problem.gz)
    gc.disable()
    del given, z
    gone = index() is None
    gc.enable()
    assert gone

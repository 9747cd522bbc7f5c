"""Edges and their reverses: which they are in any graph, and convolutions that make weights once for both."""

from __future__ import annotations

import gc
import weakref
from collections import Counter

import pytest
import torch
from pair_problems import CASES, SPEC, WEIGHTS, Problem, case
from torch import Tensor

from eqaccel import TensorProductSpec
from eqaccel.errors import OperandError
from eqaccel.ops import (
    EdgePairs,
    EdgeWeights,
    GivenEdges,
    Graph,
    LastProduct,
    MemoryLimits,
    Portions,
    TensorProductConv,
    convolve_in_pieces,
    convolve_pairs,
    depend_on_lengths,
    given_edges,
)
from eqaccel.ops.library import call_operator


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
    portions = Portions(pairs, graph, MemoryLimits(len(rows) * WEIGHTS * 8, 1000))
    z = convolve_pairs(conv, x, problem.y, problem.last, rows, portions)
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
    given = problem.given(pairs=problem.pairs, limits=MemoryLimits(pairs=1000))
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

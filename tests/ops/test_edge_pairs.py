"""Edges and their reverses: which they are in any graph, and convolutions that make weights once for both."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor

from eqaccel import TensorProductSpec
from eqaccel.errors import OperandError
from eqaccel.families.neighbors.reference import find_neighbors
from eqaccel.ops import (
    EdgePairs,
    EdgeWeights,
    GivenEdges,
    Graph,
    LastProduct,
    MatrixProduct,
    Neighbors,
    TensorProductConv,
    convolve_in_pieces,
    convolve_pairs,
    depend_on_lengths,
    given_edges,
)
from eqaccel.ops.library import call_operator

CELL = np.array([[3.0, 0.0, 0.0], [0.4, 2.2, 0.0], [0.0, -0.3, 1.5]])
Edges = tuple[Tensor, Tensor, Tensor]  # receivers, senders, vectors


def edges_of(num_atoms: int, dtype: torch.dtype = torch.float64, cutoff: float = 1.7) -> Edges:
    """All edges of atoms in a cell that is smaller than the cutoff; vectors of reverses are opposite in every bit."""
    positions = np.random.default_rng(num_atoms).uniform(-1.0, 3.0, (num_atoms, 3))
    rows = find_neighbors(positions, CELL, cutoff, images=5)
    receiver, sender = rows[:, 0].astype(int), rows[:, 1].astype(int)
    vectors = positions[receiver] - positions[sender] - rows[:, 2:5] @ CELL
    return torch.from_numpy(receiver), torch.from_numpy(sender), torch.from_numpy(vectors).to(dtype)


def chosen(edges: Edges, which: Tensor) -> Edges:
    receiver, sender, vectors = edges
    return receiver[which], sender[which], vectors[which]


def case(name: str, dtype: torch.dtype) -> tuple[int, Edges]:
    torch.manual_seed(0)
    num_atoms = {"own images": 1, "empty": 3, "nothing": 0, "two": 2}.get(name, 7)
    if num_atoms == 0 or name == "empty":
        none = torch.zeros(0, dtype=torch.int64)
        return num_atoms, (none, none, torch.zeros(0, 3, dtype=dtype))
    edges = edges_of(num_atoms, dtype)
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


CASES = ["crystal", "own images", "two", "shuffled", "some missing", "one missing", "twice", "zeros", "nearly", "empty"]


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
    if name in ("one missing", "nearly"):
        assert 2 * len(members) > len(ends)


SPEC = TensorProductSpec.channelwise("5x0e+5x1o", "1x0e+1x1o", "5x0e+5x1o")
WEIGHTS, TERMS, INPUTS = SPEC.weight_numel, 9, 3


class Problem:
    """A convolution whose weights are (inputs first)^2 second, with inputs that are the same for pairs.

    What is computed for a row does not depend on how many there are.
    """

    def __init__(self, name: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.num_atoms, (receiver, sender, vectors) = case(name, dtype)
        index = Graph(receiver, sender, self.num_atoms, self.num_atoms).index
        self.pairs = EdgePairs.find(vectors, index, self.num_atoms)
        self.receiver, self.sender, self.index = receiver.to(device), sender.to(device), index.to(device)
        if self.index.is_cuda:  # there is room for more pairs than there are
            room = torch.tensor([[0, -2], [0, -2]], dtype=torch.int32)[: len(vectors)]
            of_gpu = self.pairs.row.to(device), torch.cat([self.pairs.edges, room]).to(device)
            self.pairs = EdgePairs(*of_gpu, Neighbors().to(device))
        torch.manual_seed(1)
        edges, made = len(vectors), {"dtype": dtype, "device": device}
        self.conv, product = TensorProductConv(SPEC).to(device), MatrixProduct().to(device)
        self.x, self.y = torch.randn(self.num_atoms, SPEC.x_dim, **made), torch.randn(edges, SPEC.y_dim, **made)
        self.inputs = torch.randn(len(self.pairs.edges), INPUTS, **made)[self.pairs.row.long()]
        self.gz = torch.randn(self.num_atoms, SPEC.z_dim, **made)
        first, self.second = torch.randn(INPUTS, TERMS, **made), torch.randn(TERMS, WEIGHTS, **made)
        self.hidden = lambda rows: product(rows, first).square()
        self.last = LastProduct(self.hidden, product, self.second)

    def weights(self, rows: Tensor) -> Tensor:
        return self.last.product(self.hidden(rows), self.second)

    def leaves(self) -> list[Tensor]:
        return [t.clone().requires_grad_(True) for t in (self.x, self.y, self.inputs)]

    def given(self, **options: object) -> GivenEdges:
        return GivenEdges(torch.stack([self.sender, self.receiver]), self.index, self.num_atoms, **options)


@pytest.mark.parametrize("name", ["crystal", "own images", "one missing", "twice", "empty"])
def test_a_convolution_with_weights_of_pairs(name: str, dtype: torch.dtype, device: torch.device) -> None:
    if device.type == "cuda" and name == "twice":
        pytest.skip("kernels of GPUs share weights of edges that are in the order of slots")
    problem = Problem(name, dtype, device)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        x, y, inputs = problem.leaves()
        rows = problem.pairs.rows_of(inputs)
        hidden: list[Tensor] = []

        def keep(values: Tensor, hidden: list[Tensor] = hidden) -> Tensor:
            hidden.append(problem.hidden(values))
            return hidden[0]

        last = LastProduct(keep, problem.last.product, problem.second)
        z = convolve_pairs(problem.conv, x, y, last, rows, problem.pairs, problem.index)
        results.append((z.detach(), *torch.autograd.grad(z, [x, y, hidden[0], inputs], problem.gz)))
    torch.set_num_threads(1)
    assert all(map(torch.equal, *results))

    z, gx, gy, gh, ginputs = results[0]
    x, y, inputs = problem.leaves()
    weights = problem.weights(problem.pairs.rows_of(inputs).detach())[problem.pairs.row.long()].requires_grad_(True)
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
    for parts in (pairs.edges + len(weights), pairs.edges - 3, pairs.edges[:, 0], pairs.edges.long()):
        with pytest.raises(OperandError, match="parts"):
            call_operator(ops.matrix_product_shared, product.payload, product.key, weights, problem.second.t(), parts)
    for vectors in (problem.y, torch.zeros(3, 3, dtype=torch.int64), torch.zeros(3, 3)):
        with pytest.raises(OperandError):
            EdgePairs.find(vectors, problem.index, problem.num_atoms)
    dense = TensorProductConv(TensorProductSpec("2x0e", "1x0e", "2x0e", [(0, 0, 0, "uvw")]))
    x, y, w = (torch.ones(problem.num_atoms, 2).double(), problem.y[:, :1].contiguous(), weights[:, :4].contiguous())
    with pytest.raises(ValueError, match="kernels without"):
        ops.tensor_product_shared(dense.payload, dense.key, x, y, w, pairs.row, problem.index, *rest[:1], 2, True, True)

"""Graphs with edges and their reverses, and convolutions that share weights between these."""

from __future__ import annotations

import torch
from small_cells import Edges, chosen, edges_of, received_by
from torch import Tensor

from eqaccel import TensorProductSpec
from eqaccel.ops import EdgePairs, GivenEdges, Graph, LastProduct, MatrixProduct, Neighbors, TensorProductConv
from eqaccel.testing import derivatives, reference

MISSING = ["some missing", "one missing", "ghosts"]
CASES = ["crystal", "own images", "two", "shuffled", *MISSING, "twice", "zeros", "nearly", "empty"]


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


SPEC = TensorProductSpec.channelwise("5x0e+5x1o", "1x0e+1x1o", "5x0e+5x1o")
WEIGHTS, TERMS, INPUTS = SPEC.weight_numel, 9, 3


class Problem:
    """A convolution whose weights are (inputs first)^2 second, with inputs that are the same for pairs.

    What is computed for a row does not depend on how many there are.
    """

    def __init__(
        self,
        name: str,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        in_slots: bool = False,
        terms: int = TERMS,
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
        self.first, self.second = torch.randn(INPUTS, terms, **made), torch.randn(terms, WEIGHTS, **made)
        self.hidden = lambda rows: product(rows, self.first).square()
        self.last = LastProduct(self.hidden, product, self.second)

    def weights(self, rows: Tensor) -> Tensor:
        return self.last.product(self.hidden(rows), self.second)

    def leaves(self) -> list[Tensor]:
        return [t.clone().requires_grad_(True) for t in (self.x, self.y, self.inputs)]

    def given(self, **options: object) -> GivenEdges:
        return GivenEdges(torch.stack([self.sender, self.receiver]), self.index, self.num_atoms, **options)


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

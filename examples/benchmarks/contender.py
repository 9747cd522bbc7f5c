"""What is compared: one implementation of one tensor product, and whether its numbers are right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from eqaccel import Irreps, TensorProductSpec, WignerConvention
from eqaccel.benchmarks.graphs import EdgeList
from eqaccel.testing import derivatives, reference

Product = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function of x, y and w that gives z."""

_CHUNK = 2048


@dataclass(frozen=True)
class Contender:
    """One implementation of one tensor product.

    Attributes:
        bind: Prepares a graph, or a batch, and gives the product on it.
        layout: Order inside the blocks of x and z: "mul_ir" or "ir_mul".
        weight_order: Its weight i is number `weight_order[i]` of e3nn's; None if they are the same.
        convention: Whose signs its couplings have; None for the e3nn that is installed.
    """

    bind: Callable[[EdgeList], Product]
    layout: str
    weight_order: Tensor | None = None
    convention: WignerConvention | None = None

    def computed(self, spec: TensorProductSpec) -> TensorProductSpec:
        """What it computes where e3nn has this tensor product: the same, but for signs of couplings."""
        if self.convention is None:
            return spec
        irreps = (spec.irreps_in1, spec.irreps_in2, spec.irreps_out)
        return TensorProductSpec(*irreps, instructions(spec), convention=self.convention)

    def orders(self, spec: TensorProductSpec, device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
        """For each element of its rows of x, w and z, the position of that element in e3nn's order."""
        weights = torch.arange(spec.weight_numel) if self.weight_order is None else self.weight_order
        x, z = (feature_order(irreps, self.layout) for irreps in (spec.irreps_in1, spec.irreps_out))
        return x.to(device), weights.to(device), z.to(device)


def feature_order(irreps: Irreps, layout: str) -> Tensor:
    """For each element of a row in the layout, its position in e3nn's layout mul_ir."""
    order = torch.arange(irreps.dim)
    if layout == "mul_ir":
        return order
    blocks = zip(irreps, irreps.slices(), strict=True)
    return torch.cat([order[part].view(block.mul, block.ir.dim).T.flatten() for block, part in blocks])


def shapes(spec: TensorProductSpec, edges: EdgeList) -> list[tuple[int, int]]:
    """The shapes of x, y and w."""
    return [(edges.num_nodes, spec.x_dim), (edges.num_edges, spec.y_dim), (edges.num_edges, spec.weight_numel)]


class Truth:
    """The output of a tensor product and its first and second derivatives on a small graph, in float64.

    Args:
        spec: The tensor product.
        edges: A small graph or batch, on the device to compute on.
        dtype: The dtype whose rounding the operands have.
        device: Where to compute.
    """

    def __init__(self, spec: TensorProductSpec, edges: EdgeList, dtype: torch.dtype, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.spec, self.edges, self.dtype = spec, edges, dtype

        def normal(*wanted: tuple[int, int]) -> list[Tensor]:
            drawn = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in wanted)
            return [tensor.to(dtype).to(device, torch.float64) for tensor in drawn]

        inputs = shapes(spec, edges)
        self.operands, self.directions = normal(*inputs), [normal((edges.num_nodes, spec.z_dim)), normal(*inputs)]
        self._results: dict[TensorProductSpec, list[Tensor]] = {}

    def results(self, spec: TensorProductSpec) -> list[Tensor]:
        """The exact ones of a spec with the same operands."""
        if spec not in self._results:
            of_graph = {"edge_index": self.edges.edge_index, "num_receivers": self.edges.num_nodes}
            self._results[spec] = derivatives(partial(reference, spec, **of_graph), self.operands, self.directions)
        return self._results[spec]

    def error(self, contender: Contender) -> float:
        """The maximum over all results of max|result - exact| / max|exact|."""
        on_x, on_w, on_z = contender.orders(self.spec, self.operands[0].device)
        product = contender.bind(self.edges)

        def in_e3nn_order(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
            return product(x[:, on_x].contiguous(), y, w[:, on_w].contiguous())[:, on_z.argsort()]

        operands, *directions = ([t.to(self.dtype) for t in part] for part in (self.operands, *self.directions))
        found = derivatives(in_e3nn_order, operands, directions)
        exact = self.results(contender.computed(self.spec))
        return max(relative_error(*pair) for pair in zip(found, exact, strict=True))


def sample_error(
    contender: Contender, spec: TensorProductSpec, edges: EdgeList, operands: Sequence[Tensor], rows: Sequence[int]
) -> float:
    """The error of some rows of the output, computed with everything that the timed run has.

    Args:
        contender: What to check.
        spec: What it should compute.
        edges: The graph or batch that is timed.
        operands: x, y and w in the contender's own order.
        rows: Rows of the output to compare with float64.
    """
    on_x, on_w, on_z = contender.orders(spec, operands[0].device)
    computed = contender.computed(spec)
    x, y, w = operands
    with torch.no_grad():
        z = contender.bind(edges)(x, y, w)
        worst = 0.0
        for row in rows:
            exact = torch.zeros(spec.z_dim, dtype=torch.float64, device=x.device)
            for sender, edge in _incoming(edges, row, x.device):
                features = x[sender][:, on_x.argsort()].double()
                messages = reference(computed, features, y[edge].double(), w[edge][:, on_w.argsort()].double())
                exact += messages.sum(0)
            worst = max(worst, relative_error(z[row, on_z.argsort()], exact))
    return worst


def _incoming(edges: EdgeList, row: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Senders and numbers of the edges that a row of the output sums, a chunk at a time."""
    if edges.edge_index is None:
        number = torch.tensor([row], device=device)
        yield number, number
        return
    for chunk in torch.nonzero(edges.receiver == row)[:, 0].split(_CHUNK):
        yield edges.sender[chunk], chunk


def relative_error(result: Tensor, exact: Tensor) -> float:
    """max|result - exact| / max|exact|."""
    largest = exact.abs().max().clamp_min(torch.finfo(exact.dtype).tiny)
    return float((result.detach().to(exact) - exact).abs().max() / largest)


Factory = Callable[[TensorProductSpec, torch.dtype, str], Contender]
"""Builds a contender for a spec, a dtype and a device; what it dies with becomes the note of its row."""


def instructions(spec: TensorProductSpec) -> list[tuple[Any, ...]]:
    """The paths of a spec as e3nn's instructions."""
    return [(path.in1, path.in2, path.out, path.mode.value, path.weight_numel > 0) for path in spec.paths]

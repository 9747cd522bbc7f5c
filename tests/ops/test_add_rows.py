"""Sums of rows by numbers: values, order, derivatives, edges that are given, programs, bad input."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eqaccel.ops import GivenEdges, Graph, given_edges, given_to_programs

add_rows = torch.ops.eqaccel.add_rows

NUMBERS = [4, 1, 0, 1, 4, 4, 2]
"""Of five rows, of which one has no terms."""

EPS = torch.finfo(torch.float64).eps


def numbers(device: torch.device) -> Tensor:
    return torch.tensor(NUMBERS, device=device)


def sorting(device: torch.device) -> tuple[Tensor, Tensor]:
    graph = Graph(numbers(device), torch.zeros(len(NUMBERS), dtype=torch.int64, device=device), 5)
    return graph.edge, graph.row_ptr


def values(device: torch.device, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    made = torch.randn(len(NUMBERS), columns, generator=generator, dtype=torch.float64)
    return made.to(device).requires_grad_()


def by_hand(terms: Tensor) -> list[list[float]]:
    sums = [[0.0] * terms.size(1) for _ in range(5)]
    for number, row in zip(NUMBERS, terms.tolist(), strict=True):
        sums[number] = [total + term for total, term in zip(sums[number], row, strict=True)]
    return sums


def test_sums_are_in_the_order_of_rows(device: torch.device) -> None:
    """Terms of which any other order gives another sum."""
    terms = torch.tensor([1e16, 1.0, 2.0, 3.0, 1.0, -1e16, 4.0], device=device, dtype=torch.float64)
    terms = terms.unsqueeze(1) * torch.tensor([1.0, -1.0, 0.5], device=device, dtype=torch.float64)
    assert add_rows(terms, numbers(device), 5).tolist() == by_hand(terms)
    assert add_rows(terms, numbers(device), 5, *torch.ops.eqaccel.sort_rows(numbers(device), 5)).tolist() == by_hand(
        terms
    )
    assert add_rows(terms, numbers(device), 5, *sorting(device)).tolist() == by_hand(terms)


@pytest.mark.parametrize("sorted_before", [False, True])
@pytest.mark.parametrize("columns", [1, 3])
def test_derivatives(columns: int, sorted_before: bool, device: torch.device) -> None:
    order = sorting(device) if sorted_before else ()

    def sums(x: Tensor) -> Tensor:
        return add_rows(x, numbers(device), 5, *order)

    x = values(device, columns)
    assert torch.autograd.gradcheck(sums, x, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: sums(x).sin(), x)
    (third,) = torch.autograd.grad(sums(x).sin().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(third.square().sum(), x, create_graph=True)
    assert torch.autograd.grad(second.sum(), x)[0].isfinite().all()


def test_many_rows_repeat_bitwise(device: torch.device, dtype: torch.dtype) -> None:
    """As many as a GPU adds at a time, of which some sums have many terms and some have none."""
    generator = torch.Generator().manual_seed(1)
    count, rows = 40_000, 700
    chosen = (rows * torch.rand(count, generator=generator) ** 3).long().to(device)
    for columns in (1, 3):
        terms = torch.randn(count, columns, generator=generator, dtype=torch.float64).to(device, dtype)
        found = add_rows(terms, chosen, rows)
        assert all(torch.equal(add_rows(terms, chosen, rows), found) for _ in range(10))
        exact = torch.zeros(rows, columns, dtype=torch.float64)
        exact.index_add_(0, chosen.cpu(), terms.cpu().double())
        sizes = torch.zeros_like(exact).index_add_(0, chosen.cpu(), terms.cpu().double().abs())
        terms_of_sum = int(torch.bincount(chosen).max())
        assert ((found.cpu().double() - exact).abs() <= terms_of_sum * torch.finfo(dtype).eps * sizes).all()


def given(device: torch.device, check: bool) -> tuple[Tensor, GivenEdges]:
    """Edges in the order of slots, and one more behind the last that counts for nothing."""
    edges = torch.tensor([[1, 2, 0, 2, 0, 0], [0, 0, 1, 1, 2, 2]], device=device)
    graph = Graph(edges[1], edges[0], 3)
    return edges, GivenEdges(edges, graph.index, 3, check)


@pytest.mark.parametrize("check", [False, True])
def test_given_edges_are_sorted_already(check: bool, device: torch.device) -> None:
    edges, known = given(device, check)
    terms = values(device, 1)[:6].detach()
    expected = torch.zeros(3, 1, dtype=torch.float64, device=device).index_add(0, edges[1], terms)
    with given_to_programs(known) as use, torch.profiler.profile() as profile:
        found = add_rows(terms, edges[1], 3)
    assert float((found - expected).abs().max()) <= 2 * EPS * float(terms.abs().sum())
    assert not use.differed
    assert "aten::sort" not in {event.key for event in profile.key_averages()}


@pytest.mark.gpu
def test_others_are_told_from_given_edges() -> None:
    edges, known = given(torch.device("cuda"), check=True)
    terms = values(edges.device, 1)[:6].detach()
    for other in (edges[0], edges[1].flip(0)):
        with given_to_programs(known) as use:
            found = add_rows(terms, other, 3)
        assert use.differed
        expected = torch.zeros_like(found).index_add(0, other, terms)
        assert float((found - expected).abs().max()) <= 2 * EPS * float(terms.abs().sum())
    with given_edges(known), given_to_programs(known) as use:
        add_rows(terms[:4], edges[0, :4].clone(), 3)
        add_rows(terms, edges[1], 4)
    assert not use.differed  # other numbers of edges and rows are no layer over them


def test_very_many_terms_of_few_sums(device: torch.device, dtype: torch.dtype) -> None:
    """They are added in pieces: of sums with none, one and many terms, the first and the last among them."""
    generator = torch.Generator().manual_seed(2)
    for numbers in ([0] * 5000, [3] * 4000 + [1] + [5] * 900, [6] * 300 + [0] * 6000, [2] * 70_000):
        chosen = torch.tensor(numbers)[torch.randperm(len(numbers), generator=generator)].to(device)
        terms = torch.randn(len(numbers), 3, generator=generator, dtype=torch.float64).to(device, dtype)
        order = torch.ops.eqaccel.sort_rows(chosen, 7)
        found = add_rows(terms, chosen, 7, *order)
        assert torch.equal(add_rows(terms, chosen, 7, *order), found)
        exact = torch.zeros(7, 3, dtype=torch.float64, device=device).index_add_(0, chosen, terms.double())
        sizes = torch.zeros_like(exact).index_add_(0, chosen, terms.double().abs())
        terms_of_piece = 2 * len(numbers) ** 0.5 + 2
        assert ((found.double() - exact).abs() <= terms_of_piece * torch.finfo(dtype).eps * sizes).all()


def test_sort(device: torch.device) -> None:
    order, starts = torch.ops.eqaccel.sort_rows(numbers(device), 6)
    assert order.tolist() == [2, 1, 3, 6, 0, 4, 5]
    assert starts.tolist() == [0, 1, 3, 4, 4, 7, 7]


@pytest.mark.parametrize("wrong", [-1, 5])
def test_numbers_of_no_row(wrong: int) -> None:
    """On a GPU the device ends with an error, as with torch's own sums, and the process is lost."""
    chosen = torch.tensor([0, wrong, 3])
    with pytest.raises(RuntimeError, match="expected numbers from zero to those of the last row"):
        torch.ops.eqaccel.sort_rows(chosen, 5)


def test_programs(device: torch.device) -> None:
    @torch.jit.script
    def program(x: Tensor, numbers: Tensor, count: int) -> Tensor:
        return torch.ops.eqaccel.add_rows(x, numbers, count)

    x = values(device, 3)
    assert torch.equal(program(x, numbers(device), 5), add_rows(x, numbers(device), 5))


def test_opcheck(device: torch.device) -> None:
    x = values(device, 3)
    torch.library.opcheck(add_rows.default, (x, numbers(device), 5))
    torch.library.opcheck(add_rows.default, (x, numbers(device), 5, *sorting(device)))
    torch.library.opcheck(torch.ops.eqaccel.sort_rows.default, (numbers(device), 5))


def test_no_rows(device: torch.device) -> None:
    none = torch.zeros(0, dtype=torch.int64, device=device)
    x = torch.zeros(0, 3, device=device, requires_grad=True)
    sums = add_rows(x, none, 2)
    assert sums.tolist() == [[0.0] * 3] * 2
    assert torch.autograd.grad(sums.sum(), x)[0].shape == (0, 3)


def test_bad_operands(device: torch.device) -> None:
    x = values(device, 3)
    order, starts = sorting(device)
    with pytest.raises(RuntimeError, match=r"eqaccel::add_rows: argument 'numbers' must be int64"):
        add_rows(x, numbers(device).int(), 5)
    with pytest.raises(RuntimeError, match=r"argument 'values' must have shape \(rows, columns\)"):
        add_rows(x[:, 0], numbers(device), 5)
    with pytest.raises(RuntimeError, match="one for each of the 6 rows of 'values', got 7"):
        add_rows(x[1:], numbers(device), 5)
    with pytest.raises(RuntimeError, match="or both be left out"):
        add_rows(x, numbers(device), 5, order)
    with pytest.raises(RuntimeError, match="arguments 'order' and 'starts'"):
        add_rows(x, numbers(device), 5, order, starts[1:])

"""Rows by their numbers, and a column of each row: values, derivatives, batches of gradients, bad input."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import eqaccel.ops

ops = torch.ops.eqaccel


def rows(device: torch.device, count: int = 5, columns: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, columns, generator=generator, dtype=torch.float64).to(device).requires_grad_()


def numbers(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers of five rows, of which one has none; their order, and where each row begins in it."""
    chosen = torch.tensor([4, 1, 0, 1, 4, 4, 2], device=device)
    graph = eqaccel.Graph(chosen, torch.zeros_like(chosen), 5)
    return chosen, graph.edge, graph.row_ptr


def take(x: Tensor) -> Tensor:
    return ops.take_rows(x, *numbers(x.device))


COLUMNS = {1: [0, 0, 0, -1, 0], 3: [2, 0, -1, 1, 1]}


def pick(x: Tensor) -> Tensor:
    return ops.take_columns(x, torch.arange(5, device=x.device), torch.tensor(COLUMNS[x.size(1)], device=x.device))


def torch_pick(x: Tensor) -> Tensor:
    return x[torch.arange(5, device=x.device), torch.tensor(COLUMNS[x.size(1)], device=x.device)]


CASES = {
    "rows": (take, lambda x: x[numbers(x.device)[0]], 3),
    "the only column": (pick, torch_pick, 1),
    "columns": (pick, torch_pick, 3),
}


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_torch(case: str, device: torch.device, dtype: torch.dtype) -> None:
    ours, theirs, columns = CASES[case]
    for x in (rows(device, columns=columns).detach().to(dtype), rows(device, columns=columns)):
        assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("case", CASES)
def test_derivatives(case: str, device: torch.device) -> None:
    ours, theirs, columns = CASES[case]
    x = rows(device, columns=columns)
    assert torch.autograd.gradcheck(ours, x, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: ours(x).sin(), x)

    def orders(function) -> list[Tensor]:
        found = [function(x).sin().sum()]
        for _ in range(3):
            found.append(torch.autograd.grad(found[-1].sum(), x, create_graph=True)[0])
        return found

    for ours_of_order, theirs_of_order in zip(orders(ours), orders(theirs), strict=True):
        # Sums of at most seven terms of absolute value one.
        assert float((ours_of_order - theirs_of_order).detach().abs().max()) <= 49 * torch.finfo(torch.float64).eps


def test_sums_are_in_the_order_of_the_graph(device: torch.device) -> None:
    x = rows(device, columns=1)
    chosen, order, _ = numbers(device)
    terms = torch.tensor([1e16, 1.0, 2.0, 3.0, 1.0, -1e16, 4.0], device=device, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(take(x), x, terms.unsqueeze(1))
    expected = [0.0] * 5
    for place in order.tolist():
        expected[int(chosen[place])] += float(terms[place])
    assert gradient.flatten().tolist() == expected


def test_no_sort_is_left_in_gradients(device: torch.device) -> None:
    """What torch does for an index puts gradients into zeros, after a sort."""
    x = rows(device)
    with torch.profiler.profile() as profile:
        (first,) = torch.autograd.grad(take(x).sin().sum(), x, create_graph=True)
        torch.autograd.grad(first.square().sum(), x)
        (first,) = torch.autograd.grad(pick(x).sin().sum(), x, create_graph=True)
        torch.autograd.grad(first.square().sum(), x)
    assert not {event.key for event in profile.key_averages()} & {"aten::index_put_", "aten::_index_put_impl_"}


def test_bad_operands(device: torch.device) -> None:
    x = rows(device)
    chosen, order, starts = numbers(device)
    with pytest.raises(RuntimeError, match="argument 'numbers' must be int64"):
        ops.take_rows(x, chosen.int(), order, starts)
    with pytest.raises(RuntimeError, match="arguments 'order' and 'starts'"):
        ops.take_rows(x, chosen, order[1:], starts)
    with pytest.raises(RuntimeError, match="arguments 'order' and 'starts'"):
        ops.take_rows(x, chosen, order, starts[1:])
    with pytest.raises(RuntimeError, match="argument 'x' must have shape"):
        ops.take_rows(x[0], chosen, order, starts)
    with pytest.raises(RuntimeError, match="a number for each of the 5 rows"):
        ops.take_columns(x, torch.arange(4, device=device), torch.zeros(4, dtype=torch.int64, device=device))

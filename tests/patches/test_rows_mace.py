"""Rows in MACE's own code: the same numbers from fewer kernels, and sums in one order, on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("mace", reason="needs mace-torch")

import mace_models as mm
from patch_checks import assert_close, patched

from eqaccel.ops import GivenEdges, Graph, given_edges
from eqaccel.ops.graph import sorting_scope
from eqaccel.patches import replacement
from eqaccel.patches.rows import OwnRows, own_rows

pytestmark = pytest.mark.filterwarnings("ignore")

_SORTS = {"aten::index_put_", "aten::_index_put_impl_"}
"""What torch does for the gradient of an index."""


@pytest.fixture
def on_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replacement, "own_rows", lambda model, row: OwnRows(row))


def gradients(model: Any, **options: bool) -> tuple[dict[str, Tensor], set[str]]:
    """Of a loss on energies and forces, and stresses if they are asked for; and the operators of the whole step."""
    batch = mm.batch(model)
    with torch.profiler.profile() as profile:
        found = model(batch, training=True, **options)
        parts = [found[name] for name in ("energy", "forces", "stress") if found.get(name) is not None]
        loss = sum(part.square().sum() for part in parts)
        model.zero_grad(set_to_none=True)
        loss.backward()
    values = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return values | {"loss": loss.detach(), "forces": found["forces"]}, {e.key for e in profile.key_averages()}


@pytest.mark.parametrize("options", [{}, {"compute_stress": True}], ids=["forces", "stress"])
def test_steps_of_training_are_the_same(options: dict[str, bool], on_every_device: None, device: torch.device) -> None:
    plain = mm.energy_model().to(device)
    expected, operators = gradients(plain, **options)
    assert operators & _SORTS
    values, operators = gradients(patched(plain), **options)
    assert values.keys() == expected.keys()
    floor = max(float(value.abs().max()) for value in expected.values())
    for name, value in values.items():
        assert_close(value, expected[name], 1e-3 * floor)
    if not options:  # stresses take displacements of structures by other indices
        assert not operators & _SORTS
        assert "aten::slice_backward" not in operators
    assert {"eqaccel::take_rows", "eqaccel::take_columns"} <= operators


def test_one_head_of_several(on_every_device: None, device: torch.device) -> None:
    options = {
        "heads": ["first", "second"],
        "atomic_energies": [[-1.0, -2.0, -3.0], [-1.5, -2.5, -3.5]],
        "atomic_inter_scale": [1.3, 0.7],
        "atomic_inter_shift": [0.1, 0.2],
    }
    model = mm.energy_model(**options).to(device)
    batch = mm.batch(model) | {"head": torch.tensor([1, 0], device=device)}
    results = []
    for form in (lambda x: x, patched):
        found = form(model)({name: value.clone() for name, value in batch.items()}, training=True)
        (gradient,) = torch.autograd.grad(found["forces"].square().sum(), model.readouts[0].linear.weight)
        results.append((found["energy"], found["forces"], gradient))
    for value, expected in zip(*reversed(results), strict=True):
        assert_close(value, expected)


def compute(results: Callable[[], list[Tensor]]) -> tuple[list[Tensor], set[str]]:
    """What is computed inside of the mode, and by which operators of eqaccel."""
    with OwnRows(), torch.profiler.profile() as profile:
        values = results()
    names = ("eqaccel::take", "eqaccel::add_rows")
    return values, {event.key for event in profile.key_averages() if event.key.startswith(names)}


def test_other_indices_are_left_to_torch(device: torch.device) -> None:
    x = torch.randn(4, 2, dtype=torch.float64, device=device, requires_grad=True)
    edges = torch.tensor([[0, 1, 3], [1, 0, 2]], device=device)
    square = torch.tensor([[0, 1], [2, 3]], device=device)
    rows = torch.arange(4, device=device)  # made outside
    columns = torch.tensor([0, 1, 1, 0], device=device)

    def results() -> list[Tensor]:
        found = [x[0], x[:, 1], x[edges], x[edges[0].clone()], x[square.t()[0]], x[rows, columns], x[rows > 1]]
        found += [x[edges[0, 1:]], x.unsqueeze(0)[0, edges[1]], x[None], x[torch.arange(1, 3, device=device)]]
        return [*found, x.detach()[edges[0]], x[torch.arange(3, device=device), columns[:3]]]

    values, operators = compute(results)
    assert not operators
    for value, wanted in zip(values, results(), strict=True):
        assert torch.equal(value, wanted)


def sums_of(numbers: Tensor, terms: Tensor, count: int) -> list[Tensor]:
    """By the methods that libraries call, of rows of several widths."""
    by_row = numbers.unsqueeze(1).expand_as(terms)
    return [
        torch.zeros(count, terms.size(1), dtype=terms.dtype, device=terms.device).scatter_add_(0, by_row, terms),
        torch.zeros(count, 1, dtype=terms.dtype, device=terms.device).scatter_add_(-2, by_row[:, :1], terms[:, :1]),
        torch.ones(count, dtype=terms.dtype, device=terms.device).scatter_reduce_(0, numbers, terms[:, 0], "sum"),
        torch.zeros(count, 3, 1, dtype=terms.dtype, device=terms.device).scatter_add_(
            dim=0, index=numbers.view(-1, 1, 1).expand(-1, 3, 1), src=terms.unsqueeze(2)
        ),
    ]


def test_sums(device: torch.device) -> None:
    """Of edges, either row, and of atoms; the sort of numbers is made once."""
    edges = torch.tensor([[0, 1, 3, 0], [1, 0, 2, 1]], device=device)
    start = torch.randn(4, 3, dtype=torch.float64, device=device)
    for numbers in (edges[0], edges[1], torch.tensor([1, 0, 0, 1], device=device)):
        results = []
        for scope in (nullcontext(), OwnRows()):
            terms = start.clone().requires_grad_()
            with sorting_scope(), scope, torch.profiler.profile() as profile:
                found = sums_of(numbers, terms, 4)
            operators = {event.key: event.count for event in profile.key_averages()}
            (gradient,) = torch.autograd.grad(sum(f.sin().sum() for f in found), terms)
            results.append((*found, gradient))
        assert operators["eqaccel::add_rows"] == len(found)
        assert operators.get("eqaccel::graph", 0) + operators.get("eqaccel::sort_rows", 0) == 1
        for expected, value in zip(*results, strict=True):
            assert_close(value, expected)


def test_sums_by_numbers_that_were_written_to(device: torch.device) -> None:
    numbers = torch.tensor([0, 0, 1], device=device)
    terms = torch.tensor([[1.0], [2.0], [4.0]], device=device)

    def total() -> list[float]:
        index = numbers.unsqueeze(1)
        return torch.zeros(2, 1, device=device).scatter_add_(0, index, terms).flatten().tolist()

    with OwnRows():
        assert total() == [3.0, 4.0]
        numbers[0] = 1
        assert total() == [2.0, 5.0]
    with torch.inference_mode(), OwnRows():
        numbers = numbers.clone()
        assert total() == [2.0, 5.0]
        numbers[0] = 0
        assert total() == [3.0, 4.0]


def test_selections(device: torch.device) -> None:
    """By a row of edges and by other numbers, of numbers, rows and matrices: values, gradients and theirs."""
    edges = torch.tensor([[0, 1, 3, 0], [1, 0, 2, 1]], device=device)
    starts = [torch.randn(4, *shape, dtype=torch.float64, device=device) for shape in ((), (3,), (3, 3))]
    for numbers in (edges[0], edges[1], torch.tensor([1, 0, 0, 1, 3], device=device)):
        results, operators = [], set()
        for scope in (nullcontext(), OwnRows()):
            found = []
            for start in starts:
                x = start.clone().requires_grad_()
                with scope, torch.profiler.profile() as profile:
                    parts = [
                        torch.index_select(input=x * 1.0, dim=0, index=numbers),
                        (x * 2.0).index_select(dim=0, index=numbers),
                    ]
                operators = {event.key for event in profile.key_averages()}
                assert torch.equal(parts[0], start[numbers])
                value = sum(part.sin().sum() for part in parts)
                (first,) = torch.autograd.grad(value, x, create_graph=True)
                (second,) = torch.autograd.grad(first.square().sum(), x)
                found += [*parts, first, second]
            results.append(found)
        assert "eqaccel::take_rows" in operators
        for expected, value in zip(*results, strict=True):
            assert_close(value, expected)


def test_other_selections_are_left_to_torch(device: torch.device) -> None:
    x = torch.randn(4, 3, dtype=torch.float64, device=device, requires_grad=True) * 1.0
    wide = torch.randn(4, 20, dtype=torch.float64, device=device, requires_grad=True) * 1.0
    numbers = torch.tensor([1, 0, 0], device=device)

    def results() -> list[Tensor]:
        found = [torch.index_select(x, 1, numbers), torch.index_select(x.detach(), 0, numbers)]
        found += [torch.index_select(wide, 0, numbers), torch.index_select(x, 0, numbers.int())]
        found += [torch.index_select(x, 0, numbers[:0]), torch.index_select(x.detach().long(), 0, numbers)]
        found += [torch.index_select(x[0, 0], 0, numbers[1:2])]
        return [*found, torch.index_select(x.detach(), 0, numbers, out=torch.empty_like(x[:3]).detach())]

    values, operators = compute(results)
    assert not operators
    for value, wanted in zip(values, results(), strict=True):
        assert torch.equal(value, wanted)


def test_other_sums_are_left_to_torch(device: torch.device) -> None:
    """Of different numbers in a row, along other dimensions, of wide rows, of integers, and greatest values."""
    terms = torch.randn(3, 2, dtype=torch.float64, device=device)
    mixed = torch.tensor([[0, 1], [1, 0], [1, 1]], device=device)
    numbers = torch.tensor([1, 0, 1], device=device)
    wide = torch.randn(3, 20, dtype=torch.float64, device=device)

    def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    def results() -> list[Tensor]:
        return [
            zeros(2, 2).scatter_add_(0, mixed, terms),
            zeros(3, 2).scatter_add_(1, mixed, terms),
            zeros(2, 20).scatter_add_(0, numbers.unsqueeze(1).expand(-1, 20), wide),
            zeros(2, dtype=torch.int64).scatter_add_(0, numbers, torch.arange(3, device=device)),
            zeros(2).scatter_reduce_(0, numbers, terms[:, 0], "amax"),
            zeros(2).scatter_reduce_(0, numbers, terms[:, 0], "sum", include_self=False),
            zeros(2, 3).scatter_add_(0, numbers[:2].unsqueeze(1).expand(2, 2), terms),
            zeros(2, 2).scatter_add_(0, numbers[:0].unsqueeze(1).expand(0, 2), terms[:0]),
        ]

    values, operators = compute(results)
    assert not operators
    for value, wanted in zip(values, results(), strict=True):
        assert torch.equal(value, wanted)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("says_what_is_read", [True, False])
def test_given_edges_whose_receivers_stand_first_need_no_sort(
    says_what_is_read: bool, check: bool, device: torch.device
) -> None:
    edges = torch.tensor([[0, 0, 1, 2, 2], [1, 2, 0, 0, 1]], device=device)
    index = Graph(edges[0], edges[1], 3).index
    terms = torch.randn(5, 1, dtype=torch.float64, device=device)
    zeros = torch.zeros(3, 1, dtype=torch.float64, device=device)
    given = GivenEdges(edges.flip(0), index, 3, check, read=edges if says_what_is_read else None)
    with torch.profiler.profile() as profile, given_edges(given), OwnRows(receiver_row=0):
        sums = [zeros.clone().scatter_add_(0, row.unsqueeze(1), terms) for row in edges]
    for value, row in zip(sums, edges, strict=True):
        assert_close(value, zeros.index_add(0, row, terms))
    operators = {event.key for event in profile.key_averages()}
    assert ("eqaccel::sort_rows" in operators) == (not check and not says_what_is_read)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("receiver_row", [0, 1])
def test_reverses_of_given_edges_are_told_from_them(receiver_row: int, check: bool, device: torch.device) -> None:
    """While a GPU records, edges are told by their number: NequIP's receivers stand in the other row."""
    edges = torch.tensor([[0, 0, 1, 2, 2], [1, 2, 0, 0, 1]], device=device)
    graph = Graph(edges[0], edges[1], 3)
    terms = torch.randn(5, 1, dtype=torch.float64, device=device)
    zeros = torch.zeros(3, 1, dtype=torch.float64, device=device)
    x = torch.ones_like(zeros).requires_grad_()
    with given_edges(GivenEdges(edges.flip(0), graph.index, 3, check)), OwnRows(receiver_row):
        value = zeros.clone().scatter_add_(0, edges[0, :, None], terms)
        (gradient,) = torch.autograd.grad(x[edges[1]], x, terms)
    assert_close(value, zeros.index_add(0, edges[0], terms))
    assert_close(gradient, zeros.index_add(0, edges[1], terms))


def test_lengths_and_directions(device: torch.device) -> None:
    """Rows of length zero have no gradient, as those of torch."""
    start = torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0], [3.0, 0.1, 0.2]], dtype=torch.float64, device=device)
    results = []
    for scope in (nullcontext(), OwnRows()):
        x = start.clone().requires_grad_()
        with scope:
            vectors = x * 1.0
            lengths = torch.linalg.norm(vectors, dim=-1, keepdim=True)
            unit = torch.ops.eqaccel.unit_vectors(vectors)[0]
        value = (lengths.sin() + (unit * start.cos()).sum(1, keepdim=True)).square().sum()
        (first,) = torch.autograd.grad(value, x, create_graph=True)
        (second,) = torch.autograd.grad(first[[0, 2]].sin().sum(), x, create_graph=True)
        (third,) = torch.autograd.grad(second[[0, 2]].sin().sum(), x)
        # Short rows are divided by 1e-12, which leaves directions derivatives of that size.
        results.append((lengths, unit, first[[0, 2]], second[[0, 2]], third[[0, 2]]))
    for expected, value in zip(*results, strict=True):
        assert_close(value, expected)
    x = start.clone().requires_grad_()
    with OwnRows():
        (gradient,) = torch.autograd.grad(torch.linalg.norm(x, dim=-1, keepdim=True).sum(), x)
    assert torch.equal(gradient[1], torch.zeros_like(gradient[1]))


def test_directions_of_rows_that_were_written_to_are_computed_anew(device: torch.device) -> None:
    x = torch.ones(2, 3, dtype=torch.float64, device=device, requires_grad=True)
    with OwnRows():
        vectors = x * 1.0
        torch.linalg.norm(vectors, dim=-1, keepdim=True)
        vectors[0, 0] = -1.0
        assert float(torch.ops.eqaccel.unit_vectors(vectors)[0][0, 0].detach()) < 0


def test_a_range_that_was_written_to_counts_no_more(device: torch.device) -> None:
    x = torch.randn(4, 2, dtype=torch.float64, device=device, requires_grad=True)

    def result(flipped: bool) -> list[Tensor]:
        rows = torch.arange(4, device=device)
        if flipped:
            rows.copy_(rows.flip(0))
        return [x[rows, torch.zeros_like(rows)]]

    (values,), operators = compute(lambda: result(flipped=False))
    assert torch.equal(values, x[:, 0])
    assert operators == {"eqaccel::take_columns"}
    (values,), operators = compute(lambda: result(flipped=True))
    assert torch.equal(values, x[:, 0].flip(0))
    assert not operators


def is_active(scope: AbstractContextManager[Any]) -> bool:
    return not isinstance(scope, nullcontext)


def test_where_it_is_active(device: torch.device) -> None:
    model = torch.nn.Linear(2, 2).to(device)
    assert is_active(own_rows(model)) == (device.type == "cuda")
    with torch.autograd.forward_ad.dual_level():
        assert not is_active(own_rows(model))
    with torch.no_grad():
        assert is_active(own_rows(model)) == (device.type == "cuda")
    assert not is_active(own_rows(torch.nn.Identity()))

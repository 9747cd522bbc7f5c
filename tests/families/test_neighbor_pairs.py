"""Kernels that find pairs of edges, and rows that these share: their text on a CPU, without a GPU."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import SUPPORT
from hosts import compile_cpp
from small_cells import Edges, chosen, edges_of, received_by
from torch import Tensor

from eqaccel import families
from eqaccel.ops import EdgePairs, Graph

SPARE = 3
"""Nodes behind the atoms."""
MARGIN = 64
"""Numbers on either side of what kernels write."""

ATOMS = {
    "no ghosts": (9, range(9)),
    "ghosts behind": (40, range(25)),
    "ghosts between": (30, range(0, 30, 2)),
    "ghosts alone": (9, range(4)),
    "own images": (3, (0,)),
    "nothing": (3, ()),
}
"""How many there are, and which of them receive."""


def case(name: str, dtype: torch.dtype = torch.float64) -> tuple[int, Edges]:
    num_atoms, receiving = ATOMS[name]
    edges = received_by(receiving, edges_of(num_atoms, dtype))
    return num_atoms, chosen(edges, ~torch.isin(edges[1], edges[0])) if name == "ghosts alone" else edges


class Kernels:
    """The kernels, compiled for a CPU; none writes where it should not."""

    def __init__(self, library: Path, dtype: torch.dtype) -> None:
        self.library, self.dtype = ctypes.CDLL(str(library)), dtype

    def call(self, name: str, *arguments: Any, to: tuple[Tensor, ...]) -> None:
        """`to`: the last arguments, which are written to."""
        guarded = [torch.full((t.numel() + 2 * MARGIN,), 77, dtype=t.dtype) for t in to]
        for memory, t in zip(guarded, to, strict=True):
            memory[MARGIN : MARGIN + t.numel()] = t.flatten()
        inside = [memory[MARGIN:] for memory in guarded]
        passed = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else a for a in (*arguments, *inside)]
        getattr(self.library, f"on_cpu_{name}")(*passed)
        for memory, t in zip(guarded, to, strict=True):
            assert bool((memory[:MARGIN] == 77).all())
            assert bool((memory[MARGIN + t.numel() :] == 77).all())
            t.copy_(memory[MARGIN : MARGIN + t.numel()].view_as(t))

    def pairs(self, packed: Tensor, num_atoms: int, capacity: int, *, all_reversible: bool) -> EdgePairs:
        """As eqaccel::neighbor_pairs finds them."""
        graph = num_atoms, num_atoms + SPARE, capacity, packed, ctypes.c_bool(all_reversible)
        counts, row = torch.full((num_atoms,), -9, dtype=torch.int32), torch.zeros(capacity, dtype=torch.int32)
        self.call("count_pairs", *graph, to=(counts,))
        ends = counts.cumsum(0, dtype=torch.int32)
        room = (capacity + 1) // 2 if all_reversible else int(ends[-1])
        members, differ = torch.full((room, 2), -9, dtype=torch.int32), torch.ones(1, dtype=torch.float64)
        self.call("write_pairs", *graph, ends, room, to=(row, members, differ))
        return EdgePairs(row, members, differ)

    def take(self, pairs: EdgePairs, values: Tensor) -> tuple[Tensor, bool]:
        """Rows of pairs, and whether values of any edge and its reverse differ."""
        size = len(pairs.edges), values.size(1)
        taken, differ = values.new_zeros(size), torch.zeros(1, dtype=torch.float64)
        self.call("take_pairs", values, pairs.edges, *size, to=(taken, differ))
        return taken, bool(differ)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[torch.dtype, Path]:
    host, folder = SUPPORT / "gpu_on_cpu", tmp_path_factory.mktemp("kernels")
    places = [f"-I{host}", f"-I{Path(families.__file__).parent / 'neighbors'}"]
    built = {}
    for dtype, scalar in ((torch.float32, "float"), (torch.float64, "double")):
        built[dtype] = folder / f"{scalar}.so"
        options = ["-std=c++20", "-O1", "-shared", "-fPIC", f"-DEQ_SCALAR={scalar}"]
        compile_cpp(*options, *places, host / "pairs.cpp", "-o", built[dtype])
    return built


@pytest.fixture
def kernels(libraries: dict[torch.dtype, Path], dtype: torch.dtype) -> Kernels:
    return Kernels(libraries[dtype], dtype)


def packed_of(edges: Edges, num_atoms: int, room: int) -> Tensor:
    """As eqaccel::neighbors packs them, with room behind the last edge."""
    receiver, sender, _ = edges
    count, nodes = len(receiver), num_atoms + SPARE
    graph = Graph(receiver, sender, nodes, nodes)
    beyond = torch.arange(count, count + room, dtype=torch.int32)
    others = beyond, num_atoms + beyond % SPARE, torch.zeros_like(beyond)
    rows = [torch.cat(part) for part in zip((graph.edge, graph.sender, graph.t_slot), others, strict=True)]
    head = torch.tensor([nodes, nodes], dtype=torch.int32)
    return torch.cat([head, graph.row_ptr, *rows[:2], graph.t_row_ptr, rows[2]])


@pytest.mark.parametrize("room", [0, 7])
@pytest.mark.parametrize("name", ATOMS)
def test_edges_of_ghosts_are_alone(name: str, room: int, kernels: Kernels) -> None:
    num_atoms, edges = case(name, kernels.dtype)
    receiver, sender, vectors = edges
    count = len(receiver)
    packed = packed_of(edges, num_atoms, room)
    expected = EdgePairs.find(vectors, Graph(receiver, sender, num_atoms, num_atoms).index, num_atoms)
    found = kernels.pairs(packed, num_atoms, count + room, all_reversible=False)
    assert torch.equal(found.edges, expected.edges)
    assert torch.equal(found.row[:count], expected.row)
    assert not bool(found.row[count:].any())
    assert float(found.differ) == 0
    alone = ~torch.isin(sender, receiver)
    assert torch.equal(found.edges[:, 1] == -1, alone[found.edges[:, 0].long()])
    assert bool(alone.all()) == (name in ("ghosts alone", "nothing"))
    assert bool(alone.any()) == (name not in ("no ghosts", "nothing"))
    if name == "no ghosts":
        whole = kernels.pairs(packed, num_atoms, count + room, all_reversible=True)
        assert torch.equal(whole.row, found.row)
        assert torch.equal(whole.edges[: len(found.edges)], found.edges)
        assert bool((whole.edges[len(found.edges) :, 1] == -2).all())


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_pairs_of_edges_without_room_stay_in_bounds(share: float, libraries: dict[torch.dtype, Path]) -> None:
    """Edges from one atom to another may be there without those that lead back."""
    num_atoms, edges = case("ghosts between")
    capacity = int(share * len(edges[0]))
    packed = packed_of(chosen(edges, torch.arange(capacity)), num_atoms, 0)
    kernels = Kernels(libraries[torch.float32], torch.float32)
    found = kernels.pairs(packed, num_atoms, capacity, all_reversible=False)
    first, second = found.edges.unbind(1)
    for values, least, end in ((found.row, 0, len(first)), (first, 0, capacity), (second, -1, capacity)):
        assert bool(((values >= least) & (values < end)).all())


@pytest.mark.parametrize("name", ["no ghosts", "ghosts between", "ghosts alone"])
def test_rows_of_edges_that_are_alone(name: str, kernels: Kernels) -> None:
    """They are compared with nothing, and nothing is added to them."""
    num_atoms, edges = case(name)
    count, columns = len(edges[0]), 2
    pairs = kernels.pairs(packed_of(edges, num_atoms, 0), num_atoms, count, all_reversible=False)
    first, second = pairs.edges.long().unbind(1)
    there = second >= 0
    made = torch.Generator().manual_seed(0)
    rows = torch.randn(len(first), columns, generator=made, dtype=kernels.dtype)
    values = rows[pairs.row.long()]
    taken, differ = kernels.take(pairs, values)
    assert torch.equal(taken, rows)
    assert not differ
    for edge in (first[there], first[~there]):
        if len(edge):
            changed = values.clone()
            changed[edge[-1], columns - 1] = 9.0
            assert kernels.take(pairs, changed)[1] == bool(there[pairs.row[edge[-1]]])
    spread = torch.full_like(values, torch.nan)
    kernels.call("spread_pairs", rows, pairs.row, pairs.edges, count, columns, to=(spread,))
    assert torch.equal(spread, torch.zeros_like(values).index_copy(0, first, rows))
    values = torch.randn(count, columns, generator=made, dtype=kernels.dtype)
    sums = torch.full_like(rows, torch.nan)
    kernels.call("add_pairs", values, pairs.edges, len(first), columns, to=(sums,))
    exact = values[first].double()
    exact[there] += values[second[there]].double()
    assert torch.equal(sums, exact.to(kernels.dtype))  # one rounding, and none for those that are alone


@pytest.mark.parametrize("portion", [7, 1000])
@pytest.mark.parametrize("name", ATOMS)
def test_rows_that_are_added_some_edges_at_a_time(name: str, portion: int, kernels: Kernels) -> None:
    """The sums have the bits of those of all edges at once; rows beyond the last pair are zeros."""
    num_atoms, edges = case(name)
    count, room, columns = len(edges[0]), 7, 4
    packed, all_reversible = packed_of(edges, num_atoms, room), name in ("no ghosts", "own images", "nothing")
    pairs = kernels.pairs(packed, num_atoms, count + room, all_reversible=all_reversible)
    values = torch.randn(count + room, columns, dtype=kernels.dtype)
    values[count:] = torch.nan  # of edges that are none
    rows = len(pairs.edges)
    whole, sums = (torch.full((rows, columns), torch.nan, dtype=kernels.dtype) for _ in range(2))
    kernels.call("add_pairs", values, pairs.edges, rows, columns, to=(whole,))
    for first in range(0, len(values), portion):
        last = min(first + portion, len(values))
        end = last if last < len(values) else max(last, rows)
        part = values[first:last].clone()
        kernels.call("add_some_pairs", part, pairs.row, pairs.edges, first, last, rows, columns, end, to=(sums,))
    assert bool(sums.isfinite().all())
    assert torch.equal(sums, whole)

"""eqaccel.ops.Neighbors: edges in order, and forces from gradients, beside NumPy that looks at every pair."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_cells import CELL

from eqaccel import runtime
from eqaccel.codegen import Direction
from eqaccel.errors import OperandError
from eqaccel.families.neighbors import NEIGHBORS
from eqaccel.families.neighbors.reference import find_neighbors
from eqaccel.ops import EdgePairs, EdgeTensors, Graph, MatrixProduct, Neighbors
from eqaccel.step import System
from eqaccel.step.candidates import Candidates
from eqaccel.targets import TARGETS

CUTOFF = 1.7
SPARE = 3


def system(num_atoms: int, periodic: bool, seed: int = 0) -> System:
    positions = np.random.default_rng(seed).uniform(-1.0, 3.0, (num_atoms, 3))
    periods = np.full((1, 3), periodic)
    return System(positions, CELL[None], periods, np.zeros(num_atoms, dtype=np.int64), (num_atoms,))


def num_nodes(num_atoms: int, device: torch.device) -> int:
    """With the spare ones."""
    return num_atoms + (SPARE if device.type == "cuda" else 0)


def edges_of(atoms: System, device: torch.device, dtype: torch.dtype, capacity: int = 8000) -> EdgeTensors:
    candidates = Candidates.find(atoms, CUTOFF, 0.3, device)
    positions, cells = (torch.from_numpy(a).to(device) for a in (atoms.positions, atoms.cells))
    structure = torch.zeros(len(positions), dtype=torch.int32, device=device)
    search = Neighbors().to(device)
    edges: EdgeTensors = search(positions, cells, structure, candidates.tensors, CUTOFF, SPARE, capacity, dtype)
    return edges


@pytest.mark.parametrize("periodic", [True, False])
@pytest.mark.parametrize("num_atoms", [1, 2, 9, 40])
def test_edges_are_those_of_all_pairs(num_atoms: int, periodic: bool, device: torch.device, dtype: torch.dtype) -> None:
    atoms = system(num_atoms, periodic)
    expected = find_neighbors(atoms.positions, CELL, CUTOFF, images=5 if periodic else 0)
    edges = edges_of(atoms, device, dtype)
    count = int(edges.num_edges)
    assert count == len(expected)
    assert edges.edge_index[1, :count].tolist() == expected[:, 0].tolist()
    assert edges.edge_index[0, :count].tolist() == expected[:, 1].tolist()
    # A vector is a difference of numbers up to 3 and a sum of three shifts, each of which is rounded, and then itself.
    error = np.abs(edges.vectors[:count].double().cpu().numpy() - expected[:, 5:]).max(initial=0.0)
    assert error <= 8 * 20 * np.finfo(np.float64).eps + CUTOFF * torch.finfo(dtype).eps / 2
    lengths = edges.vectors[count:].norm(dim=1)
    assert bool((lengths > CUTOFF).all())
    assert bool((edges.edge_index[:, count:] >= num_atoms).all())


def edges_of_local(atoms: System, local: int, device: torch.device, dtype: torch.dtype, room: int = 0) -> EdgeTensors:
    """The edges that the first atoms receive; candidates of the others, ghosts, lead one way.

    Args:
        room: On a GPU, for so many edges more than there are.
    """
    found = Candidates.find(atoms, CUTOFF, 0.3, device).tensors
    ptr = found.ptr.clamp(max=int(found.ptr[local]))
    count, nodes = int(ptr[-1]), len(ptr)
    order = found.sender[:count].sort(stable=True)
    t_ptr = torch.searchsorted(order.values, torch.arange(nodes, dtype=torch.int32, device=device)).int()
    # There is room behind the candidates, with others in it.
    t_order = torch.cat([order.indices.int(), found.t_order[count:]])
    positions, cells = (torch.from_numpy(a).to(device) for a in (atoms.positions, atoms.cells))
    where = positions, cells, ptr, ptr, found.sender, found.shift, t_ptr, t_order
    search = Neighbors().to(device)

    def with_room(capacity: int) -> EdgeTensors:
        bounds = CUTOFF, SPARE, capacity, dtype, False
        return EdgeTensors(*torch.ops.eqaccel.neighbors(search.payload, search.key, *where, *bounds))

    return with_room(max(1, int(with_room(1).num_edges) + room))


@pytest.mark.parametrize("local", [1, 5, 9])
def test_atoms_that_receive_nothing(local: int, device: torch.device, dtype: torch.dtype) -> None:
    atoms = system(9, True)
    whole = edges_of(atoms, device, dtype)
    there = torch.nonzero(whole.edge_index[1, : int(whole.num_edges)] < local)[:, 0]
    edges = edges_of_local(atoms, local, device, dtype)
    edge_index = edges.edge_index
    assert int(edges.num_edges) == len(there) == edge_index.size(1)
    assert torch.equal(edges.vectors, whole.vectors[there])
    assert torch.equal(edge_index, whole.edge_index[:, there])
    nodes = num_nodes(9, device)
    assert torch.equal(edges.graph, Graph(edge_index[1], edge_index[0], nodes).index)
    forces, _ = Neighbors().to(device).forces(edges, torch.ones_like(edges.vectors), nodes)
    expected = torch.bincount(edge_index[0], minlength=nodes) - torch.bincount(edge_index[1], minlength=nodes)
    assert torch.equal(forces, expected.double()[:, None].expand(-1, 3))


@pytest.mark.parametrize("shift", [(0, 0, 0), (1, -2, 1)])
@pytest.mark.parametrize("apart", [0.0, 1e-9, 1e-3])
def test_atoms_in_one_place_are_neighbors(apart: float, shift: tuple[int, ...], device: torch.device) -> None:
    atoms = system(9, True)
    atoms.positions[4] = atoms.positions[7] + np.array(shift) @ CELL + [0, apart, 0]
    edges = edges_of(atoms, device, torch.float64)
    expected = find_neighbors(atoms.positions, CELL, CUTOFF, images=8)
    count = int(edges.num_edges)
    assert edges.edge_index[:, :count].flip(0).T.tolist() == expected[:, :2].tolist()
    # Coordinates of some ten angstrom are rounded by 1e-15 each, and so are shifts of the cell.
    assert np.isclose(float(edges.vectors[:count].norm(dim=1).min()), apart, rtol=0, atol=1e-14)


@pytest.mark.gpu
@pytest.mark.parametrize("periodic", [True, False])
@pytest.mark.parametrize("num_atoms", [1, 2, 9, 40])
def test_pairs_on_a_gpu_are_those_of_any_graph(num_atoms: int, periodic: bool, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    edges = edges_of(system(num_atoms, periodic), device, dtype)
    count, nodes = int(edges.num_edges), num_nodes(num_atoms, device)
    pairs = Neighbors().to(device).pairs(edges, num_atoms, nodes)
    of_edges = [rows[:count].cpu() for rows in (edges.edge_index[1], edges.edge_index[0], edges.vectors)]
    expected = EdgePairs.find(of_edges[2], Graph(*of_edges[:2], num_atoms).index, num_atoms)
    found = pairs.edges.cpu()
    assert torch.equal(found[: count // 2], expected.edges)
    assert torch.equal(pairs.row[:count].cpu(), expected.row)
    assert 2 * len(expected.edges) == count
    # Beyond the last there is an edge, and none that is added to it.
    assert bool((found[count // 2 :, 1] == -2).all())
    assert bool((found[:, 0] >= 0).all())
    assert bool((found[:, 0] < edges.vectors.size(0)).all())
    assert bool((pairs.row[count:] == 0).all())


@pytest.mark.gpu
@pytest.mark.parametrize("room", [0, 40])
@pytest.mark.parametrize(
    ("num_atoms", "local", "periodic"),
    [(40, 25, True), (40, 40, True), (9, 5, True), (9, 1, True), (9, 1, False), (9, 0, True), (1, 1, False)],
)
def test_edges_of_ghosts_are_alone_on_a_gpu(
    num_atoms: int, local: int, periodic: bool, room: int, dtype: torch.dtype
) -> None:
    device = torch.device("cuda")
    edges = edges_of_local(system(num_atoms, periodic), local, device, dtype, room)
    count, nodes = int(edges.num_edges), num_nodes(num_atoms, device)
    search = Neighbors().to(device)
    pairs = search.pairs(edges, num_atoms, nodes, all_reversible=False)
    of_edges = [rows[:count].cpu() for rows in (edges.edge_index[1], edges.edge_index[0], edges.vectors)]
    expected = EdgePairs.find(of_edges[2], Graph(*of_edges[:2], num_atoms).index, num_atoms)
    assert torch.equal(pairs.edges.cpu(), expected.edges)
    assert torch.equal(pairs.row[:count].cpu(), expected.row)
    assert not bool(pairs.row[count:].any())
    assert not pairs.all_reversible
    alone = of_edges[1][expected.edges[:, 0].long()] >= local
    assert torch.equal(expected.edges[:, 1] < 0, alone)
    assert float(pairs.differ) == 0
    again = search.pairs(edges, num_atoms, nodes, all_reversible=False)
    assert torch.equal(again.row, pairs.row)
    assert torch.equal(again.edges, pairs.edges)
    values = torch.randn(len(expected.edges), 3, device=device, dtype=dtype)
    whole = torch.full((len(pairs.row), 3), torch.nan, device=device, dtype=dtype)
    whole[:count] = values[pairs.row[:count].long()]
    assert torch.equal(pairs.rows_of(whole, pairs.differ), values)
    assert float(pairs.differ) == 0
    spread = torch.ops.eqaccel.spread_pairs(search.payload, search.key, values, pairs.row, pairs.edges)
    assert torch.equal(spread, torch.zeros_like(whole).index_copy_(0, pairs.edges[:, 0].long(), values))


@pytest.mark.gpu
@pytest.mark.parametrize("all_reversible", [True, False])
def test_no_edges_have_no_pairs(all_reversible: bool) -> None:
    """Nor is there room for any."""
    device = torch.device("cuda")
    nodes = num_nodes(9, device)
    graph = torch.tensor([nodes] * 2 + [0] * (2 * nodes + 2), dtype=torch.int32, device=device)
    none = torch.zeros(2, 0, dtype=torch.int64, device=device)
    edges = EdgeTensors(torch.zeros(0, 3, device=device), none, graph, graph[2:3])
    pairs = Neighbors().to(device).pairs(edges, 9, nodes, all_reversible)
    assert pairs.row.shape == (0,)
    assert pairs.edges.shape == (0, 2)
    assert pairs.rows_of(edges.vectors, pairs.differ).shape == (0, 3)
    assert float(pairs.differ) == 0


@pytest.mark.gpu
def test_pairs_of_edges_without_room_are_rows_that_there_are() -> None:
    device = torch.device("cuda")
    edges = edges_of(system(40, True), device, torch.float32, capacity=101)
    assert int(edges.num_edges) > 101
    pairs = Neighbors().to(device).pairs(edges, 40, num_nodes(40, device))
    assert pairs.row.shape == (101,)
    assert pairs.edges.shape == (51, 2)
    assert bool((pairs.row >= 0).all())
    assert bool((pairs.row < 51).all())


def test_rows_of_pairs_are_added(device: torch.device, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    matrix, product = torch.randn(9, 70, dtype=dtype, device=device), torch.eye(70, dtype=dtype, device=device)
    members = torch.tensor([[0, 5], [1, -1], [8, 2]], dtype=torch.int32)
    expected = [matrix[0] + matrix[5], matrix[1], matrix[8] + matrix[2]]
    search = None
    if device.type == "cuda":
        search = Neighbors().to(device)
        members = torch.cat([members, torch.tensor([[3, -2]], dtype=torch.int32)])
        matrix[3] = torch.nan  # of an edge that is none
        expected.append(torch.zeros_like(matrix[0]))
        added = torch.ops.eqaccel.add_pairs(search.payload, search.key, matrix, members.to(device))
        assert torch.equal(added, torch.stack(expected))
        matrix[3] = 0.0
    multiplying, members = MatrixProduct().to(device), members.to(device)
    source = (members, 0) if search is None else (search.payload, search.key)
    arguments = (*source, multiplying.payload, multiplying.key, matrix, product, members)
    assert torch.equal(torch.ops.eqaccel.multiply_pairs(*arguments), torch.stack(expected))


def test_the_packed_index_is_that_of_a_graph(device: torch.device) -> None:
    atoms = system(30, True)
    edges = edges_of(atoms, device, torch.float64)
    count = int(edges.num_edges)
    graph = Graph.from_edge_index(edges.edge_index[:, :count], 30)
    capacity, nodes = edges.vectors.size(0), num_nodes(30, device)
    sizes = [2, nodes + 1, capacity, capacity, nodes + 1, capacity]
    _, row_ptr, edge, sender, t_row_ptr, t_slot = edges.graph.split(sizes)
    for own, other in ((row_ptr, graph.row_ptr), (t_row_ptr, graph.t_row_ptr)):
        assert torch.equal(own[:31], other)
        assert bool((own[31:] == count).all())
    for own, other in ((edge, graph.edge), (sender, graph.sender), (t_slot, graph.t_slot)):
        assert torch.equal(own[:count], other)


@pytest.mark.gpu
def test_what_does_not_fit_is_counted() -> None:
    atoms, device = system(40, True), torch.device("cuda")
    count = int(edges_of(atoms, device, torch.float32).num_edges)
    small = edges_of(atoms, device, torch.float32, capacity=count // 2)
    assert int(small.num_edges) == count
    assert int(small.graph[2 : 2 + 41].max()) == count // 2


def test_forces_and_virials(device: torch.device, dtype: torch.dtype) -> None:
    atoms = system(40, True)
    edges = edges_of(atoms, device, dtype)
    count = int(edges.num_edges)
    gradient = torch.randn(edges.vectors.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradient = gradient.to(device, dtype)
    forces, virials = Neighbors().to(device).forces(edges, gradient, num_nodes(40, device))
    g, v = (t[:count].double().cpu() for t in (gradient, edges.vectors))
    sender, receiver = edges.edge_index[:, :count].cpu()
    expected = torch.zeros(40, 3, dtype=torch.float64).index_add(0, sender, g).index_add(0, receiver, -g)
    terms = torch.zeros(40, 3, dtype=torch.float64).index_add(0, sender, g.abs()).index_add(0, receiver, g.abs())
    eps = np.finfo(np.float64).eps
    assert bool(((forces[:40].cpu() - expected).abs() <= 40 * eps * terms).all())
    outer = v[:, :, None] * g[:, None, :]
    expected = torch.zeros(40, 3, 3, dtype=torch.float64).index_add(0, receiver, outer)
    terms = torch.zeros(40, 3, 3, dtype=torch.float64).index_add(0, receiver, outer.abs())
    assert bool(((virials[:40].cpu() - expected).abs() <= 40 * eps * terms).all())
    again = Neighbors().to(device).forces(edges, gradient, num_nodes(40, device))
    assert torch.equal(forces, again[0])
    assert torch.equal(virials, again[1])


def test_wrong_operands_are_named(device: torch.device) -> None:
    atoms = system(5, True)
    edges = edges_of(atoms, device, torch.float32)
    search = Neighbors().to(device)
    with pytest.raises(OperandError, match="argument 'gradient' must be contiguous"):
        search.forces(edges, edges.vectors.double(), num_nodes(5, device))
    with pytest.raises(OperandError, match="argument 'graph' must be"):
        search.forces(edges, edges.vectors, num_nodes(4, device))
    candidates = Candidates.find(atoms, CUTOFF, 0.3, device).tensors
    positions = torch.zeros(6, 3, dtype=torch.float64, device=device)
    cells = torch.from_numpy(CELL[None]).to(device)
    structure = torch.zeros(6, dtype=torch.int32, device=device)
    with pytest.raises(OperandError, match="argument 'ptr' must be contiguous"):
        search(positions, cells, structure, candidates, CUTOFF, SPARE, 100, torch.float32)


@pytest.mark.skipif(runtime.locate_nvrtc() is None, reason="the nvidia-cuda-nvrtc package is not installed")
@pytest.mark.parametrize("scalar_bytes", [4, 8])
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_100"])
def test_cuda_kernels_compile(arch: str, scalar_bytes: int) -> None:
    runtime.compile_cuda(NEIGHBORS.source(None, Direction.FORWARD, TARGETS[arch], scalar_bytes), arch)

"""Candidates of many structures that are found at once: those of each of them alone, whatever it is."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from lennard_jones import CUTOFF, crystal, moved, new_step
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eqaccel.families.neighbors.reference import find_neighbors
from eqaccel.step import System, all_pairs, candidates
from eqaccel.step.all_pairs import AllPairs
from eqaccel.step.candidates import MOST_IMAGES, Candidates

CPU = torch.device("cpu")
REACH = 2.0
EVERY = 1 << 40
BOUNDARIES = list(itertools.product([False, True], repeat=3))


def gas(seed: int, periodic: tuple[bool, ...]) -> System:
    """A few atoms, some of them in one place, in cells that may be smaller than the cutoff, and outside of them."""
    rng = np.random.default_rng(seed)
    size, length = int(rng.integers(1, 9)), rng.uniform(0.7, 4)
    cell = length * (np.eye(3) + rng.uniform(-0.3, 0.3, (3, 3)))
    positions = rng.uniform(-2, 3, (size, 3)) * length
    if size > 3:
        positions[1] = positions[0]
        positions[2] = positions[0] + cell[0]
    if seed % 2:
        cell[~np.array(periodic)] = 0
    return System(positions, cell[None], np.array([periodic]), np.zeros(size, np.int64), (size,))


def gases(seed: int) -> list[System]:
    return [gas(8 * seed + number, periodic) for number, periodic in enumerate(BOUNDARIES)]


def found_at_once(systems: list[System], device: torch.device, reach: float = REACH) -> tuple[Tensor, Tensor, Tensor]:
    together = System.join(systems)
    return AllPairs(together, reach).find(np.arange(len(together.sizes)), device)


def one_by_one(systems: list[System], reach: float = REACH) -> list[Tensor]:
    """The lists of a library, one after the other."""
    parts, first = [], 0
    for system in systems:
        arguments = system.positions, system.completed_cells[0], system.periodic[0], reach, CPU
        receiver, sender, shift = candidates._list_of(*arguments)
        order = candidates._order(receiver, sender, shift)
        parts.append((receiver[order] + first, sender[order] + first, shift[order]))
        first += len(system.positions)
    return [torch.cat(tensors) for tensors in zip(*parts, strict=True)]


@pytest.mark.parametrize("seed", range(10))
def test_they_are_those_of_a_library(seed: int, device: torch.device) -> None:
    systems = gases(seed)
    found, expected = found_at_once(systems, device), one_by_one(systems)
    assert len(expected[0]) > 50
    assert [tensor.dtype for tensor in found] == [torch.int64, torch.int64, torch.int32]
    assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("periodic", BOUNDARIES)
def test_they_are_all_there_are(periodic: tuple[bool, ...], device: torch.device) -> None:
    for size in (1, 2, 3):
        system = crystal(size, periodic=periodic)
        found = torch.column_stack([t.cpu() for t in found_at_once([system], device)]).numpy()
        rows = find_neighbors(system.positions, system.cells[0], REACH, 4)[:, :5]
        rows = rows[(rows[:, 2:][:, ~np.array(periodic)] == 0).all(axis=1)]
        assert np.array_equal(found, rows)


def test_company_and_portions_change_nothing(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    systems = [*gases(1), crystal(3), crystal(2, 1, (False, False, False)), *gases(2)]
    together = found_at_once(systems, device)
    first = 0
    for system in systems:
        alone = found_at_once([system], device)
        own = (together[0] >= first) & (together[0] < first + len(system.positions))
        assert torch.equal(together[0][own] - first, alone[0])
        assert torch.equal(together[1][own] - first, alone[1])
        assert torch.equal(together[2][own], alone[2])
        first += len(system.positions)
    for most in (1, 5000):
        monkeypatch.setattr(all_pairs, "MOST", most)
        assert all(torch.equal(a, b) for a, b in zip(found_at_once(systems, device), together, strict=True))


def test_atoms_that_are_many_cells_away(device: torch.device) -> None:
    """Their positions are rounded more, and their neighbours are the same."""
    near, rng = crystal(2), np.random.default_rng(0)
    whole = rng.integers(-100000, 100000, (8, 3))
    far = moved(near, whole @ near.cells[0])
    receiver, sender, shift = found_at_once([near], device)
    expected = shift.cpu().numpy() + whole[receiver.cpu()] - whole[sender.cpu()]
    order = candidates._order(receiver.cpu(), sender.cpu(), torch.from_numpy(expected))
    found = found_at_once([far], device)
    assert torch.equal(found[0].cpu(), receiver.cpu()[order])
    assert torch.equal(found[1].cpu(), sender.cpu()[order])
    assert np.array_equal(found[2].cpu(), expected[order])


class _Calls(TorchDispatchMode):
    """Counts what torch is asked for."""

    number = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return function(*args, **(kwargs or {}))


def test_more_structures_take_no_more_launches(device: torch.device) -> None:
    counts = []
    for number in (2, 16):
        systems = [crystal(seed=seed) for seed in range(number)]
        with _Calls() as calls:
            found_at_once(systems, device)
        counts.append(calls.number)
    assert counts[0] == counts[1] < 120


def test_small_structures_are_not_found_one_by_one(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = crystal(2), crystal(3)
    images = AllPairs(System.join([small, large]), CUTOFF + 0.3).num_images
    monkeypatch.setitem(MOST_IMAGES, device.type, int(images[0]))
    alone, made = candidates._list_of, []

    def noted(positions: np.ndarray, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        made.append(len(positions))
        return alone(positions, *arguments)

    monkeypatch.setattr(candidates, "_list_of", noted)
    Candidates.find(System.join([small, large, small]), CUTOFF, 0.3, device)
    assert images[1] > images[0]
    assert made == [27]


def test_structures_without_atoms(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = replace(crystal(1), positions=np.zeros((0, 3)), types=np.zeros(0, np.int64), sizes=(0,))
    systems = [empty, crystal(2), empty, crystal(3), empty]
    lists = []
    for most in (0, EVERY):
        monkeypatch.setitem(MOST_IMAGES, device.type, most)
        lists.append(Candidates.find(System.join(systems), CUTOFF, 0.3, device).tensors)
    assert all(torch.equal(a, b) for a, b in zip(*lists, strict=True))
    lonely = System(np.zeros((1, 3)), np.zeros((1, 3, 3)), np.zeros((1, 3), bool), np.zeros(1, np.int64), (1,))
    assert [len(tensor) for tensor in found_at_once([lonely], device)] == [0, 0, 0]


def test_a_step_finds_them_again_when_one_structure_has_moved(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    systems = [crystal(seed=seed) for seed in range(4)]
    results = []
    for most in (0, EVERY):
        monkeypatch.setitem(MOST_IMAGES, device.type, most)
        step = new_step(device)
        step(System.join(systems))
        for number, by in enumerate((0.1, 0.16, -0.2)):  # beyond half the skin from the second on
            now = [system if at != 2 else moved(system, by * np.eye(27, 3)) for at, system in enumerate(systems)]
            results.append(step(System.join(now)))
            assert step.rebuilds == 1 + number
    for one, other in zip(results[:3], results[3:], strict=True):
        assert one.num_edges == other.num_edges
        assert np.array_equal(one.forces, other.forces)
        assert np.array_equal(one.energies, other.energies)
        assert np.array_equal(one.virials, other.virials)

"""eqaccel.step: candidates that are never stale, and a step that follows whatever a simulation does."""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from lennard_jones import CUTOFF, assert_right, crystal, moved, new_step

from eqaccel.errors import SettingsError, StructureError
from eqaccel.families.neighbors.reference import find_neighbors
from eqaccel.step import System, candidates
from eqaccel.step.all_pairs import AllPairs
from eqaccel.step.candidates import Candidates
from eqaccel.step.engine import MOST_SKIN
from eqaccel.step.system import completed

CPU = torch.device("cpu")


@pytest.mark.parametrize("periodic", [(True, True, True), (False, False, False), (True, False, True)])
def test_small_moves_keep_the_list(periodic: tuple[bool, bool, bool], device: torch.device) -> None:
    step, system, rng = new_step(device), crystal(periodic=periodic), np.random.default_rng(1)
    for _ in range(4):
        assert_right(step, moved(system, rng.uniform(-0.04, 0.04, system.positions.shape)))
    assert step.rebuilds == 1


def test_atoms_that_leave_the_skin_in_one_step(device: torch.device) -> None:
    step, system, rng = new_step(device), crystal(), np.random.default_rng(1)
    for _ in range(6):
        system = moved(system, rng.normal(0, 0.3, system.positions.shape))
        assert_right(step, system)
    assert step.rebuilds > 3


def test_lists_of_fast_atoms_last_longer(device: torch.device) -> None:
    """As long as they go on from where they were: other structures tell nothing of the next one."""
    fast, fixed = new_step(device, skin=None), new_step(device, skin=0.5)
    system, rng = crystal(), np.random.default_rng(1)
    velocities = rng.uniform(-0.05, 0.05, system.positions.shape)
    for _ in range(30):
        system = moved(system, velocities)
        assert_right(fast, system)
        fixed(system)
    assert fast.skin == MOST_SKIN
    assert fixed.skin == 0.5
    assert 1 < fast.rebuilds <= fixed.rebuilds / 2
    assert fast.captures["more candidates"] == 0
    screened = new_step(device, skin=None)
    for seed in range(4):
        screened(moved(crystal(seed=seed), rng.uniform(-2, 2, system.positions.shape)))
    assert screened.skin == 0.5
    slow = new_step(device, skin=None)
    for _ in range(30):
        system = moved(system, 0.15 * velocities)
        slow(system)
    assert slow.skin == 0.5
    assert slow.rebuilds > 1


def test_one_atom_is_teleported_and_back(device: torch.device) -> None:
    step, system = new_step(device), crystal()
    there = system.positions.copy()
    there[5] += [1.3, -0.7, 0.4]
    for positions in (system.positions, there, system.positions):
        assert_right(step, replace(system, positions=positions))


def test_wrapped_atoms(device: torch.device) -> None:
    step, system = new_step(device), crystal()
    first = step(system)
    shifts = np.random.default_rng(2).integers(-3, 4, system.positions.shape)
    wrapped = step(moved(system, shifts @ system.cells[0]))
    # Positions up to ten are rounded, and slopes of 30 neighbours are up to 1e3.
    assert np.abs(wrapped.forces - first.forces).max() <= 30 * 1e3 * 10 * np.finfo(np.float64).eps
    assert wrapped.num_edges == first.num_edges


def test_pairs_are_the_same_wherever_they_are_found(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every structure by itself, of some at once and of others by themselves, of all at once."""
    systems = [crystal(), crystal(2, seed=5, periodic=(True, False, True)), crystal(3, 6, (False, False, False))]
    lists = []
    assert sorted(AllPairs(System.join(systems), CUTOFF + 0.3).num_images > 1000) == [False, False, True]
    for most in (0, 1000, 1 << 40):
        monkeypatch.setitem(candidates.MOST_IMAGES, device.type, most)
        found = Candidates.find(System.join(systems), CUTOFF, 0.3, device).tensors
        assert all(tensor.device.type == device.type for tensor in found)
        lists.append(found)
    assert len(lists[0].sender) > 300
    for one, other in itertools.pairwise(lists):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("periodic", [(True, True, True), (True, False, True)])
def test_atoms_that_are_put_back_keep_the_list(periodic: tuple[bool, bool, bool], device: torch.device) -> None:
    """Programs do so with atoms that leave a cell; in a crystal some stand on its walls, and leave in every step."""
    step, systems = new_step(device), [crystal(periodic=periodic), crystal(2, seed=5)]
    systems.append(crystal(3, seed=6, periodic=(False, False, False)))
    first, rng = step(System.join(systems)), np.random.default_rng(2)
    f = np.eye(3) + 0.002 * rng.uniform(-1, 1, (3, 3))
    for cells in (np.eye(3), f, f @ f.T):
        now = []
        for system in systems:
            whole = rng.integers(-3, 4, system.positions.shape) * system.periodic
            near = system.positions @ cells + rng.uniform(-0.02, 0.02, whole.shape)
            cell = system.cells @ cells
            now.append(replace(system, positions=near + whole @ cell[0], cells=cell))
        together = step(System.join(now))
        alone = [new_step(device)(system) for system in now]
        assert together.num_edges == sum(outcome.num_edges for outcome in alone)
        expected_forces = np.concatenate([outcome.forces[0] for outcome in alone])
        # As for wrapped atoms above.
        assert np.abs(together.forces[0] - expected_forces).max() <= 30 * 1e3 * 10 * np.finfo(np.float64).eps
    assert step.rebuilds == 1
    gone = replace(systems[2], positions=systems[2].positions + systems[2].cells[0, 0])
    assert np.abs(step(System.join([*systems[:2], gone])).forces - first.forces).max() <= 1e-9
    assert step.rebuilds == 2, "where nothing is periodic, it is not the same place"


@pytest.mark.parametrize("strain", [1e-3, 0.02, 0.3])
def test_sheared_and_stretched_cells(strain: float, device: torch.device) -> None:
    step, system, rng = new_step(device), crystal(), np.random.default_rng(3)
    for number in range(4):
        f = np.eye(3) + strain * rng.uniform(-1, 1, (3, 3))
        positions = system.positions @ f if number % 2 else system.positions  # the cell alone, too
        system = replace(system, positions=positions, cells=system.cells @ f)
        assert_right(step, system)
    if strain < 0.01:
        assert step.rebuilds == 1, "a step of a barostat needs no new list"


def test_the_bound_on_moves_is_sharp_enough_and_safe() -> None:
    rng = np.random.default_rng(4)
    kept = 0
    for seed in range(40):
        system = crystal(seed=seed)
        candidates = Candidates.find(system, CUTOFF, 0.3, CPU)
        f = np.eye(3) + rng.normal(0, 0.02, (3, 3))
        now = replace(system, positions=system.positions @ f + rng.normal(0, 0.03, (27, 3)), cells=system.cells @ f)
        if candidates.serve(now) is not None:
            kept += 1
            rows = find_neighbors(now.positions, now.cells[0], CUTOFF, 4)
            ptr, sender, shift = (t.numpy() for t in candidates.tensors[:3])
            receiver = np.repeat(np.arange(27), np.diff(ptr))
            known = set(map(tuple, np.column_stack([receiver, sender, shift]).tolist()))
            assert {tuple(map(int, row)) for row in rows[:, :5]} <= known
    assert kept > 5


def test_other_atoms_elements_and_boundaries(device: torch.device) -> None:
    step, system = new_step(device), crystal()
    assert_right(step, system)
    assert_right(step, replace(system, types=(system.types + 1) % 3))
    assert_right(step, crystal(size=2))
    assert_right(step, crystal())
    assert_right(step, crystal(periodic=(False, True, True)))
    swapped = np.arange(27)
    swapped[[3, 9]] = 9, 3
    assert_right(step, replace(system, positions=system.positions[swapped], types=system.types[swapped]))


def test_cells_smaller_than_the_cutoff(device: torch.device) -> None:
    for size in (1, 2):
        assert_right(new_step(device), crystal(size=size))


def test_one_atom_and_none(device: torch.device) -> None:
    lonely = System(np.zeros((1, 3)), np.zeros((1, 3, 3)), np.zeros((1, 3), bool), np.zeros(1, np.int64), (1,))
    outcome = new_step(device)(lonely)
    assert (outcome.num_edges, outcome.energies.tolist(), outcome.forces.tolist()) == (0, [[0.0]], [[[0.0] * 3]])
    nothing = replace(lonely, positions=np.zeros((0, 3)), types=np.zeros(0, np.int64), sizes=(0,))
    assert new_step(device)(nothing).forces.shape == (1, 0, 3)


def test_far_atoms(device: torch.device) -> None:
    system = crystal(periodic=(False, False, False))
    assert_right(new_step(device), moved(system, 1e4))
    periodic = crystal()
    assert_right(new_step(device), moved(periodic, 1000 * periodic.cells[0].sum(0)))


def test_several_structures_as_one(device: torch.device) -> None:
    systems = [crystal(), crystal(2, seed=5), crystal(3, seed=6, periodic=(False, False, False))]
    together = new_step(device)(System.join(systems))
    first = 0
    for number, system in enumerate(systems):
        alone = new_step(device)(system)
        atoms = slice(first, first + len(system.positions))
        first = atoms.stop
        eps = 64 * np.finfo(np.float64).eps
        assert np.abs(together.forces[0, atoms] - alone.forces[0]).max() <= eps * np.abs(alone.forces).max() * 30
        assert np.abs(together.virials[0, number] - alone.virials[0, 0]).max() <= eps * np.abs(alone.virials).max() * 30


def test_one_of_several_that_moves_or_is_wrong(device: torch.device) -> None:
    """The structure that has moved too far, or cannot be computed, is found among others, wherever it is."""
    systems = [crystal(seed=seed, periodic=(seed != 1, True, seed != 1)) for seed in range(3)]
    systems.append(crystal(2, seed=3, periodic=(False, False, False)))
    step = new_step(device)
    step(System.join(systems))
    for number, system in enumerate(systems):
        changes = {
            "moved": moved(system, np.where(np.arange(len(system.positions)) == 3, 0.4, 0.0)[:, None]),
            "sheared": replace(system, cells=system.cells @ (np.eye(3) + 0.3 * np.eye(3, k=1))),
        }
        if number == 3:
            del changes["sheared"]  # a cell in which nothing is periodic means nothing
        for change in changes.values():
            now = [*systems[:number], change, *systems[number + 1 :]]
            before = step.rebuilds
            together = step(System.join(now))
            assert step.rebuilds == before + 1
            alone = new_step(device)(change)
            assert together.num_edges == sum(new_step(device)(system).num_edges for system in now)
            bound = 64 * np.finfo(np.float64).eps * np.abs(alone.virials).max() * 30
            assert np.abs(together.virials[0, number] - alone.virials[0, 0]).max() <= bound
            step(System.join(systems))
        flat = replace(system, cells=np.zeros((1, 3, 3)), periodic=np.ones((1, 3), bool))
        with pytest.raises(StructureError, match="that span a volume"):
            step(System.join([*systems[:number], flat, *systems[number + 1 :]]))


def test_forces_and_virials_are_slopes_of_the_energy(device: torch.device) -> None:
    step, system = new_step(device), crystal()
    outcome = step(system)
    rng, h = np.random.default_rng(7), 1e-5
    direction = rng.normal(size=system.positions.shape)
    energies = [step(moved(system, sign * h * direction)).energies.sum() for sign in (1, -1)]
    # The second difference of a sum of cubes of at most 30 neighbours; and the rounding of energies.
    bound = 1e4 * h**2 + 1e-15 * abs(energies[0]) * 64 / h
    assert abs((energies[0] - energies[1]) / (2 * h) + (outcome.forces[0] * direction).sum()) <= bound
    strain = rng.normal(size=(3, 3))
    strain = strain + strain.T

    def strained(sign: int) -> float:
        f = np.eye(3) + sign * h * strain
        return step(replace(system, positions=system.positions @ f, cells=system.cells @ f)).energies.sum()

    slope = (strained(1) - strained(-1)) / (2 * h)
    assert abs(slope - (outcome.virials[0, 0] * strain).sum()) <= 10 * bound


def test_results_are_bitwise_the_same_again(device: torch.device) -> None:
    step, system = new_step(device), crystal()
    first, second = step(system), step(system)
    for name in ("energies", "forces", "virials"):
        assert np.array_equal(getattr(first, name), getattr(second, name))
    step._memory.results.send(step._evaluate(True))
    outcome = step._unpack(step._memory.results.fetch(), system)
    assert np.array_equal(outcome.forces, first.forces)


def test_threads_share_a_step(device: torch.device) -> None:
    """Calls from several threads, each of which begins with its own system, give what they give one by one."""
    step, systems = new_step(device), [crystal(seed=seed) for seed in range(4)]
    alone = [step(system).forces for system in systems]

    def run(number: int) -> list[np.ndarray]:
        forces = []
        for _ in range(10):
            step.begin(systems[number])
            forces.append(step(systems[number]).forces)
        return forces

    with ThreadPoolExecutor(len(systems)) as pool:
        for expected_forces, results in zip(alone, pool.map(run, range(len(systems))), strict=True):
            assert all(np.array_equal(forces, expected_forces) for forces in results)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": np.nan}, "positions: expected finite numbers"),
        ({"positions": np.inf}, "positions: expected finite numbers"),
        ({"cells": np.nan}, "cell: expected finite numbers"),
        ({"cells": 0.0}, "cell: expected cell vectors that span a volume"),
    ],
)
def test_bad_input(change: dict[str, float], message: str, device: torch.device) -> None:
    step, system = new_step(device), crystal()
    assert_right(step, system)
    for name, value in change.items():
        array = getattr(system, name).copy()
        array[0, 0] = value
        with pytest.raises(StructureError, match=message):
            step(replace(system, **{name: array}))
    assert_right(step, system)


def test_memory_of_weights_is_a_setting(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setenv("EQACCEL_WEIGHT_MIB", "3")
    limits = new_step(device).limits.get()
    assert limits.edges == limits.pairs + limits.gradients == 3 * 2**20
    assert new_step(device, weight_bytes=8.0).limits.get() == (7.0, 1.0, 0.0)
    monkeypatch.setenv("EQACCEL_WEIGHT_MIB", "0")
    with pytest.raises(SettingsError, match=r"EQACCEL_WEIGHT_MIB: expected a whole number of MiB, at least 1, got '0'"):
        new_step(device)
    monkeypatch.delenv("EQACCEL_WEIGHT_MIB")
    limits = new_step(device).limits.get()
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    assert limits.besides == total
    assert limits.pairs + limits.gradients == pytest.approx(min(3.7 * 2**30, total / 8))


def test_completed_cells_are_orthogonal() -> None:
    cell = np.array([[2.0, 0.3, 0.0], [0.0, 0.0, 0.0], [0.1, 0.0, 4.0]])
    full = completed(cell, np.array([True, False, True]))
    assert np.array_equal(full[[0, 2]], cell[[0, 2]])
    assert np.abs(full[[0, 2]] @ full[1]).max() <= 8 * np.finfo(float).eps
    assert np.linalg.norm(full[1]) == pytest.approx(1.0, abs=1e-15)

"""eqaccel.step.ResidentStep: what is on the device is computed there, and is never computed with a stale list."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from lennard_jones import CUTOFF, crystal, lennard_jones, moved, new_step
from recordings import record_on_cpus
from torch import Tensor

from eqaccel.errors import StructureError
from eqaccel.families.neighbors.reference import find_neighbors
from eqaccel.step import Given, ResidentStep, System
from eqaccel.step.candidates import MOST_IMAGES, Candidates

EPS = np.finfo(np.float64).eps


def joined(energies: Tensor, forces: Tensor, virials: Tensor, cells: Tensor) -> Tensor:
    """What the tests have made of results: everything, one after the other."""
    return torch.cat([energies, forces.flatten(), virials.flatten()])


class Runner:
    """Hands systems over as a program does whose systems are on the device, and counts how often it reads them."""

    def __init__(self, device: torch.device, **options: object) -> None:
        self.step = ResidentStep(lennard_jones, CUTOFF, device, torch.float64, joined, skin=0.3, **options)
        self.read = 0

    def given(self, system: System) -> Given:
        on = {name: torch.from_numpy(getattr(system, name)).to(self.step.device) for name in ("positions", "cells")}
        numbers, structure = (
            torch.from_numpy(array).to(self.step.device) for array in (system.types, system.structure)
        )
        return Given(on["positions"], on["cells"], numbers, structure, torch.tensor(system.periodic[0]))

    def raw(self, system: System, given: Given) -> Tensor:
        found = self.step.take(given)
        if found is None:
            self.read += 1
            found = self.step.compute(given, system)
        return found

    def __call__(self, system: System) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Energies, forces and virials."""
        energies, forces, virials = self.raw(system, self.given(system)).split(self.step.rooms)
        count, atoms = len(system.sizes), len(system.positions)
        parts = energies[:count], forces.view(-1, 3)[:atoms], virials.view(-1, 3, 3)[:count]
        return tuple(part.cpu().numpy() for part in parts)

    def assert_right(self, system: System) -> None:
        """The results are those of a new step on the host."""
        energies, forces, virials = self(system)
        expected = new_step(torch.device("cpu"))(system)
        bound = 64 * EPS * 30 * max(1.0, np.abs(expected.forces).max(initial=0.0))
        assert np.abs(forces - expected.forces[0]).max(initial=0.0) <= bound
        sums = system.of_structures(np.add, expected.energies[0])
        assert np.abs(energies - sums).max() <= 64 * EPS * max(1.0, np.abs(expected.energies).sum())
        assert np.abs(virials - expected.virials[0]).max() <= bound * len(system.positions)


@pytest.fixture(params=["evaluated", "recorded", "lists_one_by_one", "lists_at_once"])
def runner(request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Runner:
    if request.param != "evaluated":
        record_on_cpus(monkeypatch, device)
    if request.param.startswith("lists"):
        monkeypatch.setitem(MOST_IMAGES, device.type, 1 << 40 if request.param == "lists_at_once" else 0)
    return Runner(device)


def together(periodic: tuple[bool, bool, bool] = (True, True, True)) -> System:
    return System.join([crystal(seed=seed, periodic=periodic) for seed in range(2)] + [crystal(2, 5, periodic)])


@pytest.mark.parametrize("periodic", [(True, True, True), (False, False, False), (True, False, True)])
def test_what_moves_a_little_is_not_read(periodic: tuple[bool, bool, bool], runner: Runner) -> None:
    system, rng = together(periodic), np.random.default_rng(1)
    for _ in range(4):
        runner.assert_right(moved(system, rng.uniform(-0.04, 0.04, system.positions.shape)))
    f = np.eye(3) + 1e-3 * rng.uniform(-1, 1, (3, 3))
    runner.assert_right(replace(system, positions=system.positions @ f, cells=system.cells @ f))
    assert runner.read == runner.step.rebuilds == 1


def test_results_are_left_alone_by_later_ones(runner: Runner) -> None:
    system = together()
    results = [runner.raw(now, runner.given(now)) for now in (system, moved(system, 0.01 * np.sin(system.positions)))]
    kept = [result.clone() for result in results]
    runner(moved(system, 0.01 * np.cos(system.positions)))
    assert all(torch.equal(a, b) for a, b in zip(results, kept, strict=True))
    assert not torch.equal(*results)
    assert torch.equal(runner.raw(system, runner.given(system)), kept[0]), "in a fixed order"


def test_what_is_taken_does_not_depend_on_what_was_begun(runner: Runner) -> None:
    system = together()
    runner.assert_right(system)
    near = moved(system, 0.01)
    for _ in range(2):
        runner.step.begin(runner.given(near))
        runner.assert_right(system)
        runner.step.begin(runner.given(near))
        runner.step.cancel()
    assert runner.read == 1


def test_never_stale(runner: Runner) -> None:
    """Whatever happens between two calls, the next one computes what is there."""
    system, rng = together(), np.random.default_rng(1)
    far, exchanged = system.positions.copy(), np.arange(len(system.positions))
    far[5] += [1.3, -0.7, 0.4]
    exchanged[[3, 9]] = 9, 3
    shear = np.eye(3) + 0.3 * np.eye(3, k=1)
    sheared, pressed = system.cells.copy(), system.cells.copy()
    sheared[1] = sheared[1] @ shear
    pressed[2] = 0.8 * pressed[2]
    changes = [
        moved(system, rng.normal(0, 0.3, far.shape)),
        replace(system, positions=far),
        replace(system, cells=sheared),
        replace(system, cells=pressed),
        replace(system, types=(system.types + 1) % 3),
        replace(system, positions=system.positions[exchanged], types=system.types[exchanged]),
        replace(system, periodic=np.broadcast_to([True, False, True], (3, 3))),
        replace(system, sizes=(8, 27, 27)),
        System.join([crystal(seed=seed) for seed in range(3)]),
        crystal(2),
    ]
    for change in changes:
        runner.assert_right(system)
        runner.assert_right(moved(system, 0.001))
        before = runner.read
        for _ in range(3):
            runner.assert_right(change)
        assert runner.read == before + 1


def test_atoms_that_are_put_back_keep_the_list(runner: Runner) -> None:
    system, rng = together((True, False, True)), np.random.default_rng(2)
    runner.assert_right(system)
    f = np.eye(3) + 0.002 * rng.uniform(-1, 1, (3, 3))
    for cells in (np.eye(3), f):
        whole = rng.integers(-3, 4, system.positions.shape) * np.array([True, False, True])
        near = system.positions @ cells + rng.uniform(-0.02, 0.02, whole.shape)
        cell = system.cells @ cells
        now = replace(system, positions=near, cells=cell)
        back = replace(now, positions=near + np.einsum("ni,nij->nj", whole, cell[system.structure]))
        # Positions up to ten are rounded, and slopes of 30 neighbours are up to 1e3.
        assert np.abs(runner(back)[1] - runner(now)[1]).max() <= 30 * 1e3 * 10 * EPS
    assert runner.read == 1
    gone = system.positions.copy()
    gone[0] += system.cells[0, 1]
    runner.assert_right(replace(system, positions=gone))
    assert runner.read == 2, "where it is not periodic, it is not the same place"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_number_is_refused(value: float, runner: Runner) -> None:
    for periodic in ((True, True, True), (False, False, False)):
        system = together(periodic)
        for name in ("positions", "cells"):
            runner.assert_right(system)
            array = getattr(system, name).copy()
            array[0, 0] = value
            with pytest.raises(StructureError, match="expected finite numbers"):
                runner(replace(system, **{name: array}))
            runner.assert_right(system)
    flat = together()
    runner.assert_right(flat)
    with pytest.raises(StructureError, match="that span a volume"):
        runner(replace(flat, cells=flat.cells * np.array([1.0, 0.0, 1.0])[:, None]))


def test_the_device_serves_no_more_than_there_is() -> None:
    """Whatever it says that candidates serve for has all of its neighbours among them; and it says so often enough."""
    rng, kept, served = np.random.default_rng(4), 0, 0
    for seed in range(60):
        system = crystal(seed=seed)
        runner = Runner(torch.device("cpu"))
        runner(system)
        f = np.eye(3) + rng.normal(0, 0.02, (3, 3))
        now = replace(system, positions=system.positions @ f + rng.normal(0, 0.02, (27, 3)), cells=system.cells @ f)
        exact = Candidates.find(system, CUTOFF, 0.3, torch.device("cpu"))
        served += exact.serve(now) is not None
        if runner.step.take(runner.given(now)) is None:
            continue
        kept += 1
        assert exact.serve(now) is not None
        rows = find_neighbors(now.positions, now.cells[0], CUTOFF, 4)
        ptr, sender, shift = (t.numpy() for t in exact.tensors[:3])
        receiver = np.repeat(np.arange(27), np.diff(ptr))
        known = set(map(tuple, np.column_stack([receiver, sender, shift]).tolist()))
        assert {tuple(map(int, row)) for row in rows[:, :5]} <= known
    assert served >= kept > served / 2 > 5


def test_recordings_outlast_structures_that_are_swapped(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    record_on_cpus(monkeypatch, device)
    runner, rng = Runner(device, patient=True), np.random.default_rng(8)
    pool = [crystal(3 if seed < 6 else 2, seed=seed) for seed in range(12)]
    for _ in range(12):
        chosen = [*rng.permutation(6)[:4], *(6 + rng.permutation(6)[: rng.integers(1, 4)])]
        rng.shuffle(chosen)
        system = System.join([pool[number] for number in chosen])
        for _ in range(3):
            runner.assert_right(system)
    assert runner.read == runner.step.rebuilds == 12
    captures = sum(runner.step.captures.values())
    assert 1 <= captures <= 3
    for count in (4, 3, 2):  # the last ones, which no others replace
        system = System.join([pool[number] for number in range(count)])
        for _ in range(3):
            runner.assert_right(system)
    assert sum(runner.step.captures.values()) == captures


def test_a_failure_leaves_nothing_that_is_taken(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a system whose candidates were found, but that could not be computed, the one before is read again."""
    system = together()
    runner.assert_right(system)
    other = moved(system, 0.4 * np.sin(17 * system.positions))

    def fails(*_: object) -> None:
        raise MemoryError

    for method in ("_settle", "_search_edges"):
        with monkeypatch.context() as patch:
            patch.setattr(ResidentStep, method, fails)
            with pytest.raises(MemoryError):
                runner(other)
        runner.assert_right(system)
        runner.assert_right(other)
        runner.assert_right(system)


@pytest.mark.gpu
def test_the_host_goes_on_before_the_potential_is_there() -> None:
    """What is taken is queued; a device that is busy before it is waited for, but not what comes after the list."""
    runner, system = Runner(torch.device("cuda")), together()
    for _ in range(3):
        runner(system)
    given = runner.given(system)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        results = runner.step.take(given)
    assert torch.equal(results, runner.step.take(given)), "another stream waits for what this one has queued"

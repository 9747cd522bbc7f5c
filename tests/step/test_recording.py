"""eqaccel.step: recordings follow whatever a simulation does, and one that fails leaves nothing behind."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from lennard_jones import CUTOFF, assert_right, crystal, lennard_jones, moved, new_step
from recordings import record_on_cpus
from torch import Tensor

from eqaccel.errors import StepWarning, StructureError
from eqaccel.ops import WeightLimits, depend_on_lengths
from eqaccel.ops.graph import given_pairs
from eqaccel.step import Step, System, engine


def test_recordings_follow_whatever_changes(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    record_on_cpus(monkeypatch, device)
    step, system, rng = new_step(device), crystal(), np.random.default_rng(1)
    far, swapped, f = system.positions.copy(), np.arange(27), np.eye(3) + 0.002 * rng.uniform(-1, 1, (3, 3))
    far[5] += [1.3, -0.7, 0.4]
    swapped[[3, 9]] = 9, 3
    changes: list[tuple[str, System]] = [
        ("the same", system),
        ("a little further", moved(system, rng.uniform(-0.04, 0.04, far.shape))),
        ("an atom far away", replace(system, positions=far)),
        ("back", system),
        ("beyond the skin", moved(system, rng.normal(0, 0.3, far.shape))),
        ("sheared a little", replace(system, positions=system.positions @ f, cells=system.cells @ f)),
        ("sheared much", replace(system, cells=system.cells @ (np.eye(3) + 50 * (f - np.eye(3))))),
        ("other types", replace(system, types=(system.types + 1) % 3)),
        ("swapped", replace(system, positions=system.positions[swapped], types=system.types[swapped])),
        ("other boundaries", replace(system, periodic=np.array([[True, False, True]]))),
        ("fewer atoms", crystal(2)),
    ]
    for name, change in changes:
        assert_right(step, system)
        for _ in range(2):  # begun by the call itself, and before
            assert_right(step, change)
            step.begin(change)
        assert_right(step, change)
        step.begin(change)  # and taken up by no one
        assert sum(step.captures.values()) >= 1, name
    step.cancel()
    rebuilds = step.rebuilds
    assert_right(step, crystal(2))
    assert step.rebuilds == rebuilds


def one_sided(shares: bool) -> engine.PotentialFunction:
    """A potential of the sender's type, so that an edge and its reverse are the same where all types are."""

    def potential(vectors: Tensor, edge_index: Tensor, types: Tensor, num_atoms: int, _: int) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf = vectors.detach().requires_grad_(True)
            square = leaf.square().sum(1, keepdim=True) / CUTOFF**2
            values = (1.0 + types[edge_index[0]])[:, None] * (1 - square) ** 3
            if shares:
                depend_on_lengths(values)
            found = given_pairs(edge_index[1], edge_index[0], num_atoms, values)
            each = values if found is None else found.rows[found.portions.pairs.row.long()]
            energy = torch.where(square < 1, each, torch.zeros_like(each))[:, 0]
            atoms = torch.arange(num_atoms, device=leaf.device)[:, None]
            nodes = torch.where(edge_index[1] == atoms, energy, torch.zeros_like(energy)).sum(1)
            (gradient,) = torch.autograd.grad(nodes.sum(), leaf)
        return nodes.detach(), gradient

    return potential


@pytest.mark.parametrize("begins", [False, True])
def test_recordings_notice_that_an_edge_and_its_reverse_differ(
    begins: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a recording in which they were the same; what they share is not used from then on."""
    record_on_cpus(monkeypatch, device)
    step, plain = (Step([one_sided(shares)], CUTOFF, device, torch.float64, skin=0.3) for shares in (True, False))
    system = crystal()
    alike, rng = replace(system, types=np.ones_like(system.types)), np.random.default_rng(1)
    differ = replace(alike, types=np.where(np.arange(len(system.types)) == 5, 2, 1))

    def check(now: System) -> None:
        now = moved(now, rng.uniform(-0.03, 0.03, now.positions.shape))
        if begins:
            step.begin(now)
        found, right = step(now), plain(now)
        # Sums of 30 neighbours; forces are differences of sums that are about as large as the virial.
        bound = 64 * np.finfo(np.float64).eps * np.abs(right.virials).max()
        for name in ("energies", "forces", "virials"):
            assert np.abs(getattr(found, name) - getattr(right, name)).max() <= bound

    for _ in range(3):
        check(alike)
    assert step.shares_weights
    captures = dict(step.captures)
    assert sum(captures.values()) == 1
    for now in (differ, alike, system):
        check(now)
        assert not step.shares_weights
        assert dict(step.captures) == captures | {engine._DIFFER: 1}


def test_recordings_outlast_structures_that_are_swapped(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in relaxations whose batches are filled up; what stays recorded computes what is there."""
    record_on_cpus(monkeypatch, device)
    step, rng = new_step(device, patient=True), np.random.default_rng(8)
    open_ones = (False, False, False)
    pool = [crystal(seed=seed, periodic=(seed % 2 == 0, True, True)) for seed in range(6)]
    pool += [crystal(2, seed=6 + seed, periodic=open_ones if seed % 2 else (True, True, True)) for seed in range(6)]
    alone = [new_step(device)(system) for system in pool]
    for _ in range(12):
        chosen = [*rng.permutation(6)[:4], *(6 + rng.permutation(6)[: rng.integers(1, 4)])]
        rng.shuffle(chosen)
        system = System.join([pool[number] for number in chosen])
        for _ in range(3):
            outcome = step(system)
            begin = 0
            for place, number in enumerate(chosen):
                atoms, one = slice(begin, begin + len(pool[number].positions)), alone[number]
                begin = atoms.stop
                bound = 64 * np.finfo(np.float64).eps * 30
                for name, found in (("energies", outcome.energies[0, atoms]), ("forces", outcome.forces[0, atoms])):
                    right = getattr(one, name)[0]
                    assert np.abs(found - right).max() <= bound * np.abs(right).max(), name
                error = np.abs(outcome.virials[0, place] - one.virials[0, 0]).max()
                assert error <= bound * np.abs(one.virials).max()
            assert outcome.num_edges == sum(alone[number].num_edges for number in chosen)
    assert step.rebuilds == 12
    assert sum(step.captures.values()) <= 3
    monkeypatch.setattr(engine, "_LASTING", 20)
    assert step._memory.is_swapped
    for number in range(30):  # neighbours are found anew after some of these
        assert_right(step, moved(pool[0], 0.02 * number))
    assert not step._memory.is_swapped, "what lasts needs no room for others"


def test_what_is_begun_is_checked(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    record_on_cpus(monkeypatch, device)
    step, system = new_step(device), crystal()
    assert_right(step, system)
    near = moved(system, 0.01 * np.sin(np.arange(81.0).reshape(27, 3)))
    step.begin(near)
    assert step._begun is near
    assert_right(step, near)
    step.begin(near)
    assert_right(step, system)
    bad = [(name, value) for name in ("positions", "cells") for value in (np.nan, np.inf)] + [("cells", 0.0)]
    for name, value in bad:
        array = getattr(system, name).copy()
        array[0, 0] = value
        wrong = replace(system, **{name: array})
        step.begin(wrong)
        assert step._begun is None, "the device is given nothing that cannot be computed"
        with pytest.raises(StructureError):
            step(wrong)
        assert_right(step, near)


@pytest.mark.gpu
def test_growth_records_again_and_says_why() -> None:
    step, system = new_step(torch.device("cuda")), crystal()
    assert_right(step, system)
    assert dict(step.captures) == {"first call": 1}
    dense = replace(system, positions=system.positions * 0.75, cells=system.cells * 0.75)
    assert_right(step, dense)
    assert sum(step.captures.values()) == 2
    assert_right(step, crystal(2))
    assert step.captures["other numbers of atoms"] == 1


def test_a_capture_that_fails_leaves_no_memory_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it had is free before the same is computed without it, which may take as much."""
    left: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []

    class Failing:
        def __init__(self, body: Callable[[bool], Tensor], device: torch.device) -> None:
            held = body(True) + torch.zeros(1, device=device)
            left.append(weakref.ref(held))
            raise RuntimeError("no room")

    def potential(*operands: object) -> tuple[Tensor, Tensor]:
        alive.extend(reference() is not None for reference in left)
        return lennard_jones(*operands)

    monkeypatch.setattr(engine, "Capture", Failing)
    step = Step([potential], CUTOFF, torch.device("cpu"), torch.float64, skin=0.3)
    step.not_captured = ""
    with pytest.warns(StepWarning, match=r"recording failed \(RuntimeError: no room\)"):
        assert_right(step, crystal())
    assert alive == [False]
    assert_right(step, moved(crystal(), 0.01))
    assert len(left) == 1


def out_of_memory(program: bool) -> RuntimeError:
    """What torch says of a GPU; a TorchScript program passes the text on alone, here that of a CPU."""
    text = (
        "DefaultCPUAllocator: can't allocate memory" if program else "CUDA out of memory. Tried to allocate 20.00 GiB."
    )
    if program:
        return RuntimeError(f"The following operation failed in the TorchScript interpreter.\n{text}")
    return torch.cuda.OutOfMemoryError(text)


class Hungry:
    """A potential with room for some halves of what weights may take at first, and no more."""

    def __init__(self, halves: int, program: bool = False) -> None:
        self.halves, self.program = halves, program
        self.step: Step | None = None
        self.left: list[weakref.ref[Tensor]] = []
        self.runs: list[float] = []

    def __deepcopy__(self, memo: object) -> Hungry:
        return self

    def __call__(self, *operands: object) -> tuple[Tensor, Tensor]:
        assert self.step is not None
        assert not any(reference() is not None for reference in self.left), "what failed is let go before"
        room = self.step.limits.get().edges
        self.runs.append(room)
        if room > MEMORY / 8 / 2**self.halves:
            held = torch.zeros(1)
            self.left.append(weakref.ref(held))
            raise out_of_memory(self.program)
        return lennard_jones(*operands)


MEMORY = 2.0**30


def hungry_step(halves: int, program: bool = False) -> tuple[Hungry, Step]:
    """A step on a CPU whose memory is limited like that of a GPU."""
    potential = Hungry(halves, program)
    step = potential.step = Step([potential], CUTOFF, torch.device("cpu"), torch.float64, skin=0.3)
    step.limits = WeightLimits(0, MEMORY)
    return potential, step


@pytest.mark.parametrize("program", [False, True])
@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("halves", [1, 4])
def test_a_step_without_memory_is_computed_with_less(
    halves: int, records: bool, program: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if records:
        record_on_cpus(monkeypatch, torch.device("cpu"))
    potential, step = hungry_step(halves, program)
    assert_right(step, crystal())
    tried = [MEMORY / 8 / 2**n for n in range(halves + 1)]
    assert list(dict.fromkeys(potential.runs)) == tried
    assert len(potential.left) == halves
    assert step.limits.get().edges == tried[-1]
    assert_right(step, moved(crystal(), 0.01))
    assert len(potential.left) == halves, "the next step knows"
    assert dict(step.captures) == ({"less memory for weights": 1} if records else {})
    assert step.not_captured == ("" if records else "on a CPU")


def test_memory_that_runs_out_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a larger system, for example."""
    record_on_cpus(monkeypatch, torch.device("cpu"))
    potential, step = hungry_step(0)
    assert_right(step, crystal(2))
    potential.halves = 2
    assert_right(step, crystal())
    assert step.captures["less memory for weights"] == 1
    assert sum(step.captures.values()) == 2
    assert step.limits.get().edges == MEMORY / 32


def test_memory_that_is_not_enough() -> None:
    """The error is raised where nothing can be less, and where a number of bytes was asked for."""
    potential, step = hungry_step(5)
    with pytest.raises(RuntimeError, match="out of memory"):
        step(crystal())
    assert potential.runs[-1] == MEMORY / 128
    potential.halves = 4
    assert_right(step, crystal())
    potential, step = hungry_step(4)
    step.limits = WeightLimits(MEMORY, MEMORY)
    with pytest.raises(RuntimeError, match="out of memory"):
        step(crystal())
    assert len(potential.runs) == 1


@pytest.mark.gpu
def test_memory_of_a_gpu_that_runs_out() -> None:
    """As much again as there is, and a half at first."""
    device = torch.device("cuda")
    steps: list[Step] = []

    def potential(*operands: object) -> tuple[Tensor, Tensor]:
        rows = torch.empty(int(1.5 * steps[0].limits.get().besides), dtype=torch.uint8, device=device)
        energies, gradient = lennard_jones(*operands)
        return energies + 0 * rows[:1].zero_(), gradient

    steps.append(Step([potential], CUTOFF, device, torch.float64, skin=0.3))
    total = torch.cuda.get_device_properties(device).total_memory
    for shift in (0.0, 0.01):
        assert_right(steps[0], moved(crystal(), shift))
        assert total / 16 <= steps[0].limits.get().besides <= total / 2
        assert dict(steps[0].captures) == {"less memory for weights": 1}
    steps.clear()  # its recording has most of the GPU


@pytest.mark.gpu
def test_a_capture_that_fails_is_said_once() -> None:
    def waits(*operands: object) -> tuple[Tensor, Tensor]:
        energies, gradient = lennard_jones(*operands)
        return energies * float(energies.sum() > -1), gradient  # reads the device, which a recording cannot

    step = Step([waits], CUTOFF, torch.device("cuda"), torch.float64, skin=0.3)
    with pytest.warns(StepWarning, match="recording failed"):
        assert_right(step, crystal())
    assert_right(step, moved(crystal(), 0.01))
    assert "recording failed" in step.not_captured
    assert torch.randn(3, device="cuda").isfinite().all(), "random numbers are free again"
    other = new_step(torch.device("cuda"))
    assert_right(other, crystal())
    assert not other.not_captured


@pytest.mark.gpu
def test_a_potential_that_depends_on_room_for_edges_is_not_recorded() -> None:
    def leaks(vectors: Tensor, edge_index: Tensor, types: Tensor, num_atoms: int, _: int) -> tuple[Tensor, Tensor]:
        energies, gradient = lennard_jones(vectors, edge_index, types, num_atoms, 0)
        return energies + vectors[:, 0].sum(), gradient

    step = Step([leaks], CUTOFF, torch.device("cuda"), torch.float64, skin=0.3)
    with pytest.warns(StepWarning, match="room for edges must not matter"):
        step(crystal())

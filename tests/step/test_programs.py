"""Steps of exported programs: they take the step's graph, and share weights of pairs, where that is right."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from lennard_jones import crystal, moved
from one_sided import OneSided

from eqaccel.errors import OperandError
from eqaccel.ops import GivenEdges, MemoryLimits, Portions, ProgramUse, given_to_programs
from eqaccel.ops.library import call_operator
from eqaccel.step import Outcome, Step, System

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
CUTOFF = 4.0


def new_step(model: OneSided, device: torch.device, **options: float) -> Step:
    program = torch.jit.script(model.eval()).to(device)
    return Step([torch.enable_grad()(program.forward)], CUTOFF, device, torch.float64, **options)


def system(types: np.ndarray | None = None) -> System:
    return replace(crystal(), types=np.zeros_like(crystal().types) if types is None else types)


def assert_same(one: Outcome, other: Outcome) -> None:
    """Sums over 370 neighbours and 8 channels, in other orders."""
    for name in ("energies", "forces", "virials"):
        found, expected = getattr(one, name), getattr(other, name)
        assert np.abs(found - expected).max() <= 3 * 370 * 8 * np.finfo(np.float64).eps * np.abs(expected).max()


@pytest.mark.parametrize("turned", [False, True])
def test_programs_share_where_that_is_right(turned: bool, device: torch.device) -> None:
    """Atoms of one type have the same weights both ways; layers over other edges take none of the step's."""
    model, rng = OneSided(turned), np.random.default_rng(0)
    step, plain = new_step(model, device), new_step(model, device)
    plain._lengths_decide, plain._programs_differ = False, True  # what it would do by itself
    for _ in range(4):
        now = moved(system(), rng.normal(0, 0.02, system().positions.shape))
        assert_same(step(now), plain(now))
        assert step.shares_weights == (not turned)
        assert not plain.shares_weights


def test_weights_of_other_atoms_are_not_shared(device: torch.device) -> None:
    types = np.zeros_like(crystal().types)
    types[3] = 1
    model = OneSided()
    step, plain = new_step(model, device), new_step(model, device)
    plain._lengths_decide, plain._programs_differ = False, True
    looks_each_time = device.type == "cpu"
    for own, shares in ((None, True), (types, False), (None, looks_each_time)):
        assert_same(step(system(own)), plain(system(own)))
        assert step.shares_weights == shares


def test_gradients_some_edges_at_a_time(device: torch.device) -> None:
    model = OneSided()
    whole, bounded = new_step(model, device), new_step(model, device, weight_bytes=2**15)
    assert_same(bounded(system()), whole(system()))
    assert bounded.shares_weights


@pytest.mark.parametrize("shares", [True, False])
def test_programs_keep_no_more_weights_than_they_may(shares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that find no room are made again, with the same bits."""
    types = np.zeros_like(crystal().types)
    types[3] = not shares
    model, layers = OneSided(layers=4), 4
    results, made = [], []

    class Noted(Portions):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr("eqaccel.ops.graph.Portions", Noted)
    step = new_step(model, torch.device("cpu"))
    rows = step(system(types)).num_edges // (2 if shares else 1)
    layer_bytes = float(rows * model.conv.last.factors().numel() // 3 * 8)
    for room in (layers, 1):
        step.limits.get = lambda room=room: MemoryLimits(room * layer_bytes, layer_bytes / 2)
        results.append(step(system(types)))
        assert step.shares_weights == shares
    for name in ("energies", "forces", "virials"):
        assert np.array_equal(getattr(results[0], name), getattr(results[1], name))
    assert_same(results[0], new_step(model, torch.device("cpu"))(system(types)))
    if shares:
        assert [portions.times_made for portions in made[1:3]] == [layers, 2 * layers - 1]


PEAK = """
import re, sys
from pathlib import Path
import numpy as np, torch
sys.path.insert(0, {support!r})
from dataclasses import replace
from lennard_jones import crystal
from one_sided import OneSided
from eqaccel.step import Step

def peak():
    return 1024 * int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])

def step(channels, layers, **options):
    program = torch.jit.script(OneSided(channels=channels, layers=layers).eval())
    found = Step([torch.enable_grad()(program.forward)], 4.0, torch.device("cpu"), torch.float64, **options)
    found(replace(system, types=types))
    return found

system = crystal()
types = np.zeros_like(system.types)
types[3] = {other}
step(256, 1, weight_bytes=2.0**20)
before = peak()
for options in ({{"weight_bytes": {limit}}}, {{}}):  # the peak of the second one is the higher one
    assert step(256, {layers}, **options).shares_weights == (not {other})
    print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts as Linux does")
@pytest.mark.parametrize("other", [0, 1])
def test_memory_of_a_program_is_bounded(other: int) -> None:
    """With one atom of another type nothing is shared, so that weights are twice as many."""
    layers, edges = 8, 10_000
    layer_bytes = edges * 2 * 256 * 8 // (1 if other else 2)
    limit = 2.0 * layer_bytes
    support = str(Path(__file__).parents[1] / "support")
    script = PEAK.format(support=support, other=other, layers=layers, limit=limit)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    bounded, whole = map(int, done.stdout.split())
    assert whole > layers * layer_bytes
    assert bounded < limit + layer_bytes  # what else there is comes to less than a layer


def test_graphs_are_taken_back_last_first() -> None:
    edges = GivenEdges(torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, dtype=torch.int32), 1)
    with given_to_programs(edges) as outer:
        with pytest.raises(ValueError, match="in between"), given_to_programs(edges):
            raise ValueError("in between")
        with pytest.raises(OperandError, match="was given last, number 1, got number 2"):
            call_operator(torch.ops.eqaccel.take_graph, 2)
    assert outer == ProgramUse()

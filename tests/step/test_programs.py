"""Steps of exported programs: they take the step's graph, and share weights of pairs, where that is right."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from lennard_jones import crystal, moved
from one_sided import OneSided

from eqaccel.errors import OperandError
from eqaccel.ops import GivenEdges, ProgramUse, given_to_programs
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


def test_graphs_are_taken_back_last_first() -> None:
    edges = GivenEdges(torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, dtype=torch.int32), 1)
    with given_to_programs(edges) as outer:
        with pytest.raises(ValueError, match="in between"), given_to_programs(edges):
            raise ValueError("in between")
        with pytest.raises(OperandError, match="was given last, number 1, got number 2"):
            call_operator(torch.ops.eqaccel.take_graph, 2)
    assert outer == ProgramUse()
    with pytest.raises(OperandError, match="'pairs' must be row, edges, differ and payload"):
        call_operator(torch.ops.eqaccel.give_graph, edges.edge_index, edges.index, 1, True, [edges.index], 0, 1.0)

"""torch-sim's wrappers of MACE models: patched in place, conforming, with the same numbers whatever is simulated."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("mace", reason="needs mace-torch")
pytest.importorskip("torch_sim", reason="needs torch-sim-atomistic")

import mace_models as mm
import torch_sim
import torch_sim_checks as tc
from torch_sim.models.mace import MaceModel
from torch_sim.neighbors import vesin_nl_ts

import eqaccel
from eqaccel.errors import PatchError

pytestmark = pytest.mark.filterwarnings("ignore")


DTYPE = torch.float64


def model() -> torch.nn.Module:
    return mm.energy_model(atomic_numbers=list(tc.ELEMENTS), r_max=tc.CUTOFF)


@pytest.fixture
def make(device: torch.device) -> tc.Make:
    return lambda dtype: MaceModel(model(), device=device, dtype=dtype)


def test_patched_in_place(make: tc.Make, dtype: torch.dtype) -> None:
    tc.assert_patched_in_place(make, dtype)


def test_refused_if_wrong(make: tc.Make) -> None:
    tc.assert_refused_if_wrong(make, "mace")


@pytest.mark.parametrize("move", tc.MOVES)
def test_moves(make: tc.Make, move: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    tc.assert_follows(make, move, monkeypatch)


def test_never_stale(make: tc.Make, monkeypatch: pytest.MonkeyPatch) -> None:
    tc.assert_never_stale(make, monkeypatch)


def test_odd_states(make: tc.Make, dtype: torch.dtype) -> None:
    tc.assert_odd_states(make, dtype)


def test_ordinary_ways(make: tc.Make) -> None:
    tc.assert_ordinary_ways(make, torch.float64)


def test_changes_are_noticed(make: tc.Make, monkeypatch: pytest.MonkeyPatch) -> None:
    tc.assert_changes_are_noticed(make, torch.float64, monkeypatch)


def own_neighbors(positions: Any, cell: Any, pbc: Any, cutoff: Any) -> Any:
    """The same neighbours, by a function that can be copied and pickled; torch-sim's are TorchScript."""
    return vesin_nl_ts(positions, cell, pbc, cutoff)


def test_copies(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_sim.neighbors, "own_neighbors", own_neighbors, raising=False)
    make = functools.partial(MaceModel, device=device, neighbor_list_fn=own_neighbors)
    tc.assert_copies(lambda dtype: make(model(), dtype=dtype), DTYPE)


def test_other_ways_of_making_a_wrapper(make: tc.Make, device: torch.device) -> None:
    """Atoms that it was made for, neighbours of one's own, a dictionary, energies alone."""
    structures, plain = tc.crystals(), make(DTYPE)
    wanted, state = tc.computed(plain, structures), tc.state_of(plain, structures)

    fast = tc.patched(MaceModel(model(), device=device, dtype=DTYPE, neighbor_list_fn=own_neighbors))
    tc.assert_same(tc.computed(fast, structures), wanted, structures, DTYPE)
    assert "its neighbours are found by own_neighbors" in eqaccel.report(fast).rows[0].note
    fixed = {"atomic_numbers": state.atomic_numbers, "system_idx": state.system_idx}
    fast = tc.patched(MaceModel(model(), device=device, dtype=DTYPE, **fixed))
    with pytest.raises(ValueError, match="cannot be provided in both"):
        fast(state)
    assert "made for certain atoms" in eqaccel.report(fast).rows[0].note
    energies = tc.patched(MaceModel(model(), device=device, dtype=DTYPE, compute_forces=False, compute_stress=False))
    assert energies(state).keys() == {"energy"}
    fast = tc.patched(make(DTYPE))
    own = {name: getattr(state, name) for name in ("positions", "cell", "pbc", "atomic_numbers", "system_idx")}
    tc.assert_same(tc.numbers(fast(own)), wanted, structures, DTYPE)
    assert "its state is a dict" in eqaccel.report(fast).rows[0].note


def test_patched_before_it_is_wrapped(make: tc.Make, device: torch.device) -> None:
    patched = MaceModel(eqaccel.patch(model(), verify=False), device=device, dtype=torch.float64)
    assert eqaccel.report(patched).accelerated > 0
    found, wanted = (tc.computed(wrapper, tc.crystals()) for wrapper in (patched, make(torch.float64)))
    tc.assert_same(found, wanted, tc.crystals(), torch.float64)


def test_a_compiled_model_is_refused(make: tc.Make) -> None:
    wrapper = make(torch.float64)
    wrapper.model = torch.compile(wrapper.model)  # as MACE's wrapper does if it is told to
    with pytest.raises(PatchError, match=r"wrapped by torch\.compile"):
        eqaccel.patch(wrapper)

"""torch-sim's wrappers of MACE models: patched in place, conforming, with the same numbers whatever is simulated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("mace", reason="needs mace-torch")
pytest.importorskip("torch_sim", reason="needs torch-sim-atomistic")

import mace_models as mm
import torch_sim_checks as tc
from torch_sim.models.mace import MaceModel

import eqaccel
from eqaccel.errors import PatchError

pytestmark = pytest.mark.filterwarnings("ignore")


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
def test_moves(make: tc.Make, move: Callable[[Any], Any]) -> None:
    tc.assert_follows(make, move)


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

"""NequIP's wrapper for torch-sim: patched in place, conforming, with the same numbers whatever is simulated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("nequip", reason="needs nequip")
pytest.importorskip("torch_sim", reason="needs torch-sim-atomistic")

import nequip_models as nm
import torch_sim_checks as tc
from ase.data import chemical_symbols
from nequip.data.transforms import ChemicalSpeciesToAtomTypeMapper, NeighborListTransform
from nequip.integrations.torchsim import NequIPTorchSimCalc

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("nequip_defaults")]


@pytest.fixture
def make(device: torch.device) -> tc.Make:
    names = [chemical_symbols[number] for number in tc.ELEMENTS]
    shifts = dict(zip(names, (-1.0, -2.0, -3.0), strict=True))

    def build(dtype: torch.dtype) -> NequIPTorchSimCalc:
        options = {"type_names": names, "per_type_energy_scales": 1.0, "per_type_energy_shifts": shifts}
        model = nm.model(dtype=str(dtype).removeprefix("torch."), r_max=tc.CUTOFF, **options)
        species = ChemicalSpeciesToAtomTypeMapper(names, {name: name for name in names})
        return NequIPTorchSimCalc(model, device, transforms=[species, NeighborListTransform(r_max=tc.CUTOFF)])

    return build


def test_patched_in_place(make: tc.Make, dtype: torch.dtype) -> None:
    tc.assert_patched_in_place(make, dtype)


def test_refused_if_wrong(make: tc.Make) -> None:
    tc.assert_refused_if_wrong(make, "nequip")


@pytest.mark.parametrize("move", [tc.nve, tc.frechet_fire])
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


def test_copies(make: tc.Make) -> None:
    tc.assert_copies(make, torch.float64)

"""SevenNet's wrapper for torch-sim: patched in place, conforming, with the same numbers whatever is computed.

SevenNet 0.13 asks for a later torch-sim than Python 3.11 has. Two functions of that are all it lacks here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("sevenn", reason="needs sevenn")
pytest.importorskip("torch_sim", reason="needs torch-sim-atomistic")

import sevennet_models as sm
import torch_sim.elastic
import torch_sim.neighbors
import torch_sim_checks as tc
from ase.data import chemical_symbols
from sevenn.util import chemical_species_preprocess
from torch_sim.neighbors import vesin_nl_ts

pytestmark = pytest.mark.filterwarnings("ignore")

DTYPE = torch.float32  # SevenNet's wrapper has no other


def _full_stress(voigt: Tensor) -> Tensor:
    """(..., 6) in Voigt's order as (..., 3, 3)."""
    return voigt[..., [[0, 5, 4], [5, 1, 3], [4, 3, 2]]]


def _neighbors(
    positions: Tensor, cells: Tensor, pbc: Any, cutoff: Tensor, structure: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs of several structures, the structure of each pair, and cell vectors between the two atoms."""
    edges, systems, shifts = [], [], []
    for number, cell in enumerate(cells):
        atoms = (structure == number).nonzero()[:, 0]
        pairs, shift = vesin_nl_ts(positions[atoms], cell, pbc, cutoff)
        edges.append(atoms[pairs])
        systems.append(torch.full((pairs.size(1),), number, device=positions.device))
        shifts.append(shift)
    return torch.cat(edges, 1), torch.cat(systems), torch.cat(shifts)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of SevenNet's wrapper."""
    if not hasattr(torch_sim.neighbors, "torchsim_nl"):
        monkeypatch.setattr(torch_sim.neighbors, "torchsim_nl", _neighbors, raising=False)
        monkeypatch.setattr(torch_sim.elastic, "voigt_6_to_full_3x3_stress", _full_stress, raising=False)
    import sevenn.torchsim

    yield sevenn.torchsim
    sys.modules.pop("sevenn.torchsim")


@pytest.fixture(params=["0", "mf-ompa"])
def make(request: pytest.FixtureRequest, library: Any, device: torch.device) -> tc.Make:
    symbols = [chemical_symbols[number] for number in tc.ELEMENTS]
    options = {"cutoff": tc.CUTOFF, **chemical_species_preprocess(symbols)}
    modal = {"modal": "omat24"} if request.param == "mf-ompa" else {}

    def build(dtype: torch.dtype) -> Any:
        assert dtype == DTYPE
        return library.SevenNetModel(sm.model(request.param, **options), device=device, dtype=dtype, **modal)

    return build


def test_patched_in_place(make: tc.Make) -> None:
    tc.assert_patched_in_place(make, DTYPE)


def test_never_stale(make: tc.Make, monkeypatch: pytest.MonkeyPatch) -> None:
    tc.assert_never_stale(make, monkeypatch, DTYPE)


def test_odd_states(make: tc.Make) -> None:
    tc.assert_odd_states(make, DTYPE)


def test_ordinary_ways(make: tc.Make) -> None:
    tc.assert_ordinary_ways(make, DTYPE)


def test_changes_are_noticed(make: tc.Make, monkeypatch: pytest.MonkeyPatch) -> None:
    tc.assert_changes_are_noticed(make, DTYPE, monkeypatch)

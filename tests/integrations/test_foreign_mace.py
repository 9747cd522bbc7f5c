"""MACE models that compute more than the energies of atoms that a potential knows: nothing of it is left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("mace", reason="needs mace")
pytest.importorskip("ase", reason="needs ase")

import foreign_models as fm
import mace_models as mm
from mace.calculators import MACECalculator
from stepping_checks import patched

pytestmark = pytest.mark.filterwarnings("ignore")

_RESULTS = ("energy", "node_energy", "forces", "stress")


def _doubling(part: Any) -> None:
    came_as: Any = type(part)
    part.__class__ = type(came_as.__name__, (came_as,), {"forward": lambda *args: 2 * came_as.forward(*args)})


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "model": (lambda m: fm.halve_outputs(m, _RESULTS, "Mine"), "Mine has a forward method of its own"),
    "model of the same name": (lambda m: fm.halve_outputs(m, _RESULTS), "ScaleShiftMACE has a forward method"),
    "scale": (lambda m: _doubling(m.scale_shift), "ScaleShiftBlock has a forward method of its own"),
}


def _model(change: str) -> torch.nn.Module:
    model = mm.energy_model()
    CHANGES[change][0](model)
    return model


def _calculator(model: torch.nn.Module) -> Any:
    return MACECalculator(models=[model], device="cpu", default_dtype="float64")


@pytest.mark.parametrize("change", CHANGES)
def test_patched_calculators(change: str) -> None:
    plain, known, fast = _calculator(_model(change)), _calculator(mm.energy_model()), _calculator(_model(change))
    atoms = mm.structures()[0]
    fm.assert_goes_the_ordinary_way(patched(fast), plain, known, atoms, CHANGES[change][1], "float64")


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_stands_in(change: str, tmp_path: Path) -> None:
    fm.assert_nothing_stands_in(_model(change), CHANGES[change][1], tmp_path / "model.pt")

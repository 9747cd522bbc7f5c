"""SevenNet models that compute more than the energies of atoms that a potential knows: nothing of it is left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sevenn", reason="needs sevenn")
pytest.importorskip("ase", reason="needs ase")

import foreign_models as fm
import sevennet_models as sm
from stepping_checks import patched

pytestmark = pytest.mark.filterwarnings("ignore")

_RESULTS = ("inferred_total_energy", "inferred_force", "inferred_stress")


class Added(torch.nn.Module):
    """What adds something to the total energy."""

    def forward(self, data: Any) -> Any:
        """Adds it."""
        added = (1 / (1 + data["edge_vec"].square().sum(1))).sum()
        data["inferred_total_energy"] = data["inferred_total_energy"] + added
        return data


def _after_the_sum(model: Any) -> None:
    modules = list(model._modules.items())
    number = next(number for number, (name, _) in enumerate(modules) if name == "reduce_total_enegy")
    model._modules.clear()
    model._modules.update([*modules[: number + 1], ("added", Added()), *modules[number + 1 :]])


def _preprocessing(model: Any) -> None:
    came_as: Any = type(model)

    def _preprocess(self: Any, data: Any) -> Any:
        data["edge_vec"] = data["edge_vec"] * 1.1
        return came_as._preprocess(self, data)

    model.__class__ = type(came_as.__name__, (came_as,), {"_preprocess": _preprocess})


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "module after the sum": (_after_the_sum, "got added = Added"),
    "constant": (lambda m: setattr(m.reduce_total_enegy, "constant", 0.5), "energies that are scaled per atom"),
    "scale": (
        lambda m: fm.halve_outputs(m.rescale_atomic_energy, ("atomic_energy",)),
        "SpeciesWiseRescale has a forward method of its own",
    ),
    "model": (lambda m: fm.halve_outputs(m, _RESULTS, "Mine"), "Mine has a forward method of its own"),
    "model of the same name": (lambda m: fm.halve_outputs(m, _RESULTS), "AtomGraphSequential has a forward method"),
    "preprocessing": (_preprocessing, "AtomGraphSequential has a _preprocess method of its own"),
    "forces": (lambda m: fm.halve_outputs(m.force_output, ("inferred_force",), "Mine"), "got force_output = Mine"),
    "forces of the same name": (
        lambda m: fm.halve_outputs(m.force_output, ("inferred_force",)),
        "ForceStressOutputFromEdge has a forward method of its own",
    ),
}


def _model(change: str) -> torch.nn.Module:
    model = sm.model("0", "float32")
    CHANGES[change][0](model)
    return model


@pytest.mark.parametrize("change", CHANGES)
def test_patched_calculators(change: str) -> None:
    plain, known = sm.calculator(_model(change)), sm.calculator(sm.model("0", "float32"))
    fast = patched(sm.calculator(_model(change)))
    fm.assert_goes_the_ordinary_way(fast, plain, known, sm.structures()[0], CHANGES[change][1], "float32")


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_stands_in(change: str, tmp_path: Path) -> None:
    fm.assert_nothing_stands_in(_model(change), CHANGES[change][1], tmp_path / "model.pt")

"""What holds a model is exported where the model is all that it computes, and refused where it is not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("mace", reason="needs mace-torch")

import mace_models as mm
from mace.calculators import MACECalculator
from torch import nn

import eqaccel
from eqaccel.errors import ExportError

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return eqaccel.patch(mm.energy_model(), verify=False)


class Shifted(nn.Module):
    """Adds something to a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, *arguments: Any, **options: Any) -> Any:
        outputs = self.inner(*arguments, **options)
        return outputs | {"energy": outputs["energy"] + 1.0}


class Doubled(MACECalculator):
    """Adds something to a calculator."""

    def calculate(self, *arguments: Any, **options: Any) -> None:
        super().calculate(*arguments, **options)
        self.results["energy"] *= 2


class Foreign:
    """A calculator of no library that eqaccel knows."""

    def __init__(self, model: nn.Module) -> None:
        self.models = [model]

    def calculate(self, *_: Any) -> None:
        """Whatever it may be."""


def test_holders_of_one_model(model: nn.Module, tmp_path: Path) -> None:
    metadata = eqaccel.export(model, tmp_path / "model.pt", verify=False)
    calculator = MACECalculator(models=[model], device="cpu", default_dtype="float64")
    for holder in (calculator, [calculator], nn.ModuleList([model]), torch.compile(model)):
        assert eqaccel.export(holder, tmp_path / "held.pt", verify=False) == metadata


@pytest.mark.parametrize(
    ("hold", "message"),
    [
        (lambda m: [m, mm.energy_model()], r"model: expected one model, got 2 in list \(0, 1\)"),
        (Shifted, r"but Shifted has a forward method of its own; pass the model inside \(inner\)"),
        (
            lambda m: SimpleNamespace(mixer=SimpleNamespace(calcs=[SimpleNamespace(models=[m]), object()])),
            r"but SimpleNamespace combines calculators; pass the model inside \(calcs.0.models.0\)",
        ),
        (
            lambda m: MACECalculator(models=[m], device="cpu", default_dtype="float64", energy_units_to_eV=0.5),
            r"but MACECalculator converts units \(energy_units_to_eV\)",
        ),
        (
            lambda m: Doubled(models=[m], device="cpu", default_dtype="float64"),
            r"but Doubled has a calculate method of its own; pass the model inside \(models.0\)",
        ),
        (Foreign, r"but Foreign has a calculate method of its own; pass the model inside \(models.0\)"),
        (lambda m: None, "model: expected a torch.nn.Module or an ASE calculator with one"),
    ],
)
def test_holders_that_are_refused(hold: Any, message: str, model: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=message):
        eqaccel.export(hold(model), tmp_path / "model.pt")
    assert not list(tmp_path.iterdir())


def test_hooks_are_told_where_a_file_is_without_them(tmp_path: Path) -> None:
    """A potential stands in for the model and its convolutions."""
    model = eqaccel.patch(mm.energy_model(**mm.TINY), verify=False)
    path = tmp_path / "model.pt"
    for module, name in ((model, "the model"), (model.interactions[0].conv_tp, "interactions.0.conv_tp")):
        hook = module.register_forward_hook(lambda _module, _arguments, value: value)
        with pytest.raises(
            ExportError, match=f"model: {name} has hooks, which the file may be without; take them away"
        ):
            eqaccel.export(model, path, verify=False)
        eqaccel.export(model, path)
        hook.remove()
    path.unlink()
    model.interactions[0].conv_tp.register_forward_hook(lambda _module, _arguments, value: 2 * value)
    with pytest.raises(ExportError, match=r"no file was written. Take away the hooks of interactions.0.conv_tp"):
        eqaccel.export(model, path)
    assert not path.exists()

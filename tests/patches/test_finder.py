"""Where models are found in what a user hands over, and that a kind of model is all that eqaccel asks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import eqaccel
from eqaccel.errors import ExportError, PatchError
from eqaccel.patches import ModelKind, ReportRow, finder, register
from eqaccel.patches.finder import FoundModel, find_models
from eqaccel.patches.kind import Swapping
from eqaccel.patches.precision import Options


class Toy(nn.Module):
    """A model."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class ToySwapping(Swapping):
    """Replaces nothing."""

    def swaps(self, model: nn.Module, options: Options) -> list[Any]:
        raise PatchError("model: a toy")

    def rows(self, model: nn.Module) -> list[ReportRow]:
        return [ReportRow("part", "Linear", False, "left: a toy")]


class ToyKind(ModelKind):
    """A kind of model that another package brings; it cannot be exported."""

    name = "Toy"
    ranks: dict[str, int] = {}  # noqa: RUF012
    swapping = ToySwapping()

    def recognises(self, model: nn.Module) -> bool:
        return isinstance(model, Toy)

    def extent(self, model: nn.Module) -> tuple[float, int]:
        return 5.0, 1

    def inputs(self, model: nn.Module, structure: Any, head: int = 0) -> dict[str, Any]:
        return {}

    def run(self, model: nn.Module, structure: Any, head: int = 0, training: bool = False) -> Any:
        return {}, torch.zeros(1, 3)


@pytest.fixture(autouse=True)
def toys_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finder, "KINDS", finder.KINDS.copy())
    register(ToyKind())


class Wrapper(nn.Module):
    """A module with a model in it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


@pytest.mark.parametrize(
    ("hold", "path"),
    [
        (lambda model: model, ""),
        (lambda model: [model], "0"),
        (lambda model: SimpleNamespace(model=model), "model"),
        (lambda model: SimpleNamespace(models=[model, model]), "models.0"),
        (lambda model: SimpleNamespace(calcs=[SimpleNamespace(models=[model]), object()]), "calcs.0.models.0"),
        (lambda model: SimpleNamespace(mixer=SimpleNamespace(calcs=[SimpleNamespace(model=model)])), "calcs.0.model"),
        (lambda model: nn.ModuleDict({"other": nn.Linear(1, 1), "it": model}), "it"),
        (lambda model: (SimpleNamespace(model=Wrapper(nn.ModuleList([model]))),), "0.model.inner.0"),
    ],
)
def test_models_are_found(hold: Any, path: str) -> None:
    model = Toy()
    target = hold(model)
    (found,) = find_models(target, PatchError)
    assert found.path == path
    assert found.model is model
    assert isinstance(found.kind, ToyKind)
    assert [row.path for row in eqaccel.report(target).rows] == [f"{path}.part".strip(".")]
    with pytest.raises(PatchError, match="a toy"):
        eqaccel.patch(target)
    assert eqaccel.unpatch(target) is target


def test_what_is_around_a_model_is_known_wherever_it_is_found() -> None:
    model = Toy()
    wrapper, container = Wrapper(model), nn.ModuleList([model])
    (found,) = find_models([wrapper, container], PatchError)
    assert found.holders == (wrapper, container)
    assert (found.path, found.model) == ("0.inner", model)
    with pytest.raises(PatchError, match=r"wrapped by torch.compile"):
        eqaccel.patch([model, torch.compile(model)])


def test_unknown_modules_stand_for_themselves() -> None:
    linear = nn.Linear(1, 1)
    assert find_models([linear], PatchError) == [FoundModel("0", linear, None)]
    for error in (PatchError, ExportError):
        with pytest.raises(error, match=r"expected a torch\.nn\.Module or an ASE calculator"):
            find_models(SimpleNamespace(), error)


def test_a_kind_that_cannot_be_exported() -> None:
    with pytest.raises(ExportError, match=r"of a kind that can be exported \(mace, nequip, sevennet\), got Toy"):
        eqaccel.export(Toy(), "model.pt")

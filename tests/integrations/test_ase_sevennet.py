"""`eqaccel.Calculator` with SevenNet models: built in code, in checkpoints, exported; against SevenNet's calculator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sevenn", reason="needs sevenn")

import calculator_checks as cc
import sevennet_models as sm

import eqaccel
from eqaccel.errors import CalculatorError
from eqaccel.integrations.export import open_model

pytestmark = pytest.mark.filterwarnings("ignore")
SINGLE = torch.finfo(torch.float32).eps


@pytest.mark.parametrize("source", ["module", "checkpoint", "exported file"])
def test_every_kind_of_source(source: str, device: torch.device, tmp_path: Path) -> None:
    model: Any = sm.model("omni")
    wanted = sm.calculator(sm.model("omni"), device=device)
    if source == "checkpoint":
        model = sm.checkpoint(tmp_path / "checkpoint.pth", "omni", model)
    elif source == "exported file":
        patched = eqaccel.patch(model, verify=False)
        eqaccel.export(patched, tmp_path / "my.pt", head="omat24", verify=False)
        model = tmp_path / "my.pt"
    found = eqaccel.Calculator(model, head="omat24", device=device, verify=False)
    assert "sevennet, head 'omat24', C H O, float32" in repr(found)
    periodic = [atoms for atoms in (*sm.structures(), *cc.variety()) if len(atoms) > 1 and atoms.pbc.all()]
    cc.assert_same_on(found, wanted, periodic, SINGLE)
    assert (found.model is None) == (source == "exported file")


def test_double_precision(device: torch.device, tmp_path: Path) -> None:
    """SevenNet itself has none; its model in float32 is as good as its numbers are."""
    file = sm.checkpoint(tmp_path / "checkpoint.pth", "0", sm.model("0"))
    found = eqaccel.Calculator(file, dtype="float64", device=device)
    assert found.parameters["dtype"] == "float64"
    cc.assert_same_on(found, sm.calculator(sm.model("0"), device=device), sm.structures()[:1], SINGLE)
    cc.assert_batch_is_single_calls(found)


def test_names_of_pretrained_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As SevenNet knows them; a file of that name goes first, and what is not to be had is told."""
    monkeypatch.chdir(tmp_path)
    assert len(open_model("SevenNet-MF-0").type_map) == 89
    sm.checkpoint(tmp_path / "7net-0", "0", sm.model("0"))
    assert len(open_model("7net-0").type_map) == len(sm.ELEMENTS)
    for name in ("7net-unknown", "7net-0.pth"):
        with pytest.raises(CalculatorError, match=f"got '{name}': No such file"):
            eqaccel.Calculator(name)

    def fail(_: str) -> str:
        raise RuntimeError("no network")

    monkeypatch.setattr("sevenn.util.pretrained_name_to_path", fail)
    with pytest.raises(CalculatorError, match=r"a name whose file cannot be had \(no network\); give the path"):
        eqaccel.Calculator("7net-omni")


def test_wrong_heads() -> None:
    with pytest.raises(CalculatorError, match="head: expected one of 'mpa', 'omat24', got 'pbe'"):
        eqaccel.Calculator(sm.model("omni"), head="pbe", device="cpu")

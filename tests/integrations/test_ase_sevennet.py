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


def test_wrong_heads() -> None:
    with pytest.raises(CalculatorError, match="head: expected one of 'mpa', 'omat24', got 'pbe'"):
        eqaccel.Calculator(sm.model("omni"), head="pbe", device="cpu")

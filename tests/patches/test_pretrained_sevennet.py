"""The pretrained potentials that come with SevenNet itself, patched, beside SevenNet's own calculator."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("sevenn", reason="needs sevenn")

import sevennet_models as sm
from ase.build import bulk, molecule
from stepping_checks import assert_all_properties, patched

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


@pytest.mark.parametrize(("name", "modal"), [("7net-0", None), ("7net-l3i5", None), ("7net-mf-0", "R2SCAN")])
def test_numbers(name: str, modal: str | None, device: torch.device) -> None:
    """On an alloy, on an oxide, whose cells are smaller than the cutoff, and on a molecule in a cell."""
    alloy, oxide, ethanol = bulk("Cu", cubic=True), bulk("MgO", "rocksalt", a=4.2), molecule("CH3CH2OH", vacuum=4.0)
    alloy.numbers[0] = 79
    oxide.cell[0, 1] += 0.2
    ethanol.pbc = True
    plain, fast = (sm.calculator(name, device=device, modal=modal) for _ in range(2))
    assert_all_properties(patched(fast), plain, [alloy, oxide, ethanol], "float32")

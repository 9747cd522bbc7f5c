"""The benchmark of whole models runs SevenNet's, and checks them against float64."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("sevenn", reason="needs sevenn")

from patch_checks import RELATIVE

from eqaccel.benchmarks import sevenn_like
from eqaccel.benchmarks.command import main

pytestmark = pytest.mark.filterwarnings("ignore")


def test_patched_and_unpatched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sevenn_like, "_LAYERS", 2)
    threads, file = torch.get_num_threads(), tmp_path / "result.json"
    small = ["--models", "sevennet-0", "--atoms", "3", "--channels", "4", "--dtype", "float64", "--compare", "none"]
    options = ["--device", "cpu", "--threads", "1", "--repetitions", "3", "--backends", "none", "--json", str(file)]
    try:
        assert main(["models", *small, *options]) == 0
    finally:
        torch.set_num_threads(threads)
    plain, fused = json.loads(file.read_text())["rows"]
    assert (plain["implementation"], fused["implementation"]) == ("e3nn", "eqaccel")
    assert max(fused["energy_difference"], fused["force_difference"]) < RELATIVE
    for row in (plain, fused):
        assert row["convolution_share"] > 0
        assert row["backward"]["median_ms"] > 0


def test_peers_are_not_tried_on_a_cpu() -> None:
    with pytest.raises(NotImplementedError, match="no kernels for the CPU"):
        sevenn_like._switched("enable_oeq", torch.nn.Identity(), "cpu")

"""The benchmark of whole models runs NequIP's, checks them against float64, and says what is not installed."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("nequip", reason="needs nequip")

from patch_checks import RELATIVE

from eqaccel import TensorProductSpec
from eqaccel.benchmarks import nequip_like
from eqaccel.benchmarks.command import main
from eqaccel.benchmarks.graphs import make_graph
from eqaccel.benchmarks.problems import PROBLEMS
from eqaccel.benchmarks.structures import water
from eqaccel.patches.rounding import STAGES

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def two_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The water model with two layers of one parity: a third of the kernels, which all are compiled here."""
    shape = nequip_like.MODELS["nequip-water"]
    options = shape.options | {"num_layers": 2, "parity": False}
    monkeypatch.setattr(nequip_like, "MODELS", nequip_like.MODELS | {"nequip-water": replace(shape, options=options)})


def rows(folder: Path, *options: str, kind: str = "models") -> list[dict]:
    """Runs `python -m eqaccel bench` on the CPU; returns what it wrote."""
    threads, file = torch.get_num_threads(), folder / "result.json"
    repetitions = [] if kind == "step" else ["--repetitions", "3"]
    common = [kind, "--device", "cpu", "--threads", "1", *repetitions, "--json", str(file)]
    try:
        assert main([*common, *options]) == 0
    finally:
        torch.set_num_threads(threads)
    return json.loads(file.read_text())["rows"]


@pytest.mark.usefixtures("two_layers")
@pytest.mark.parametrize(
    ("dtype", "limit", "compared"),
    # Beside the plain model in float64: a network in float32 rounds once a stage.
    [("float32", 2 * STAGES * torch.finfo(torch.float32).eps, True), ("float64", RELATIVE, False)],
    ids=["float32", "float64"],
)
def test_patched_unpatched_and_peers_that_are_not_installed(
    dtype: str,
    limit: float,
    compared: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for package in ("cuequivariance_torch", "openequivariance"):
        monkeypatch.setitem(sys.modules, package, None)
    before = torch.get_default_dtype()
    small = ["--models", "nequip-water", "--atoms", "24", "--channels", "4", "--dtype", dtype]
    others = [] if compared else ["--compare", "none"]
    plain, fused, *peers = rows(tmp_path, *small, *others, "--plot", str(tmp_path / "result.png"))
    assert torch.get_default_dtype() == before
    assert (plain["implementation"], fused["implementation"]) == ("e3nn", "eqaccel")
    assert max(fused["energy_difference"], fused["force_difference"]) < limit
    assert ("force_difference" in plain) == (dtype == "float32"), "in float64 the plain model is what counts as right"
    assert fused["speedup"] == pytest.approx(plain["call"]["median_ms"] / fused["call"]["median_ms"])
    for row in (plain, fused):
        assert row["atoms"] == 24
        assert row["convolution_share"] > 0
        assert row["backward"]["median_ms"] > 0
    assert f"nequip-water, 24/{plain['edges']}" in capsys.readouterr().out
    assert (tmp_path / "result.png").stat().st_size > 0
    assert {row["implementation"] for row in peers} == ({"cuEquivariance", "OpenEquivariance"} if compared else set())
    for row in peers:
        assert row["note"].startswith("not installed: ")
        assert "call" not in row


@pytest.mark.usefixtures("two_layers")
def test_steps_as_they_come_and_patched(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    before = torch.get_default_dtype()
    small = ["--models", "nequip-water", "--systems", "carbon-8,water-24", "--channels", "4", "--dtype", "float64"]
    found = rows(tmp_path, *small, "--steps", "2", "--compare", "e3nn,compile", kind="step")
    assert torch.get_default_dtype() == before
    assert [(row["system"], row["implementation"]) for row in found] == [
        (system, name) for system in ("carbon-8", "water-24") for name in ("eqaccel", "e3nn", "e3nn compiled")
    ]
    for row in found:
        if row["implementation"] == "e3nn compiled":
            assert row["note"].startswith("NotImplementedError: NequIP compiles packaged models")
            continue
        assert row["force_difference"] < RELATIVE
        assert row["step"]["repetitions"] == 2
        assert row.get("rebuilds", 1) >= 1
    assert "nequip-water, water-24" in capsys.readouterr().out


@pytest.mark.usefixtures("two_layers")
def test_peers_are_not_tried_on_a_cpu() -> None:
    options = argparse.Namespace(dtype="float32", device="cpu", channels=2)
    case = nequip_like.Case.build("nequip-water", 3, options)
    with pytest.raises(NotImplementedError, match="no kernels for the CPU"):
        nequip_like._modified("enable_OpenEquivariance", case.plain, "cpu")


def test_inner_layers_are_the_problem_of_that_name() -> None:
    model = nequip_like.build_model(torch.float64, nequip_like.MODELS["nequip-l"].options)
    scatters = [module for module in model.modules() if type(module).__name__ == "TensorProductScatter"]
    specs = [TensorProductSpec.from_e3nn(scatter.tp) for scatter in scatters]
    assert len(specs) == 6
    assert {spec.weight_numel for spec in specs[1:-1]} == {PROBLEMS["nequip-l"].spec.weight_numel}


def test_water_has_the_edges_of_the_graph_of_that_name() -> None:
    graph, edges = make_graph("water"), nequip_like.make_inputs([water(5184)])["edge_index"]
    order = (edges[0] * graph.num_nodes + edges[1]).sort().values
    assert torch.equal(order, graph.receiver * graph.num_nodes + graph.sender)


@pytest.mark.usefixtures("two_layers")
def test_training_as_it_comes_and_patched(tmp_path: Path) -> None:
    before = torch.get_default_dtype()
    small = ["--models", "nequip-water", "--systems", "water-3", "--channels", "4", "--dtype", "float64"]
    fused, plain = rows(tmp_path, *small, "--compare", "e3nn", kind="training")
    assert torch.get_default_dtype() == before
    for row in (fused, plain):
        assert row["atoms"] == 6
        assert max(row["loss_difference"], row["gradient_difference"]) < RELATIVE
    assert fused["operators"] < plain["operators"]

"""NequIP's encoding of lengths with eqaccel's kernels: the same numbers and derivatives, names and files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("nequip", reason="needs nequip")

import nequip_models as nm
from nequip.nn.embedding import BesselEdgeLengthEncoding, PolynomialCutoff
from patch_checks import assert_close, assert_same_gradients, patched
from torch.autograd import grad

from eqaccel import report
from eqaccel.errors import PatchError
from eqaccel.patches import nodes
from eqaccel.patches.nequip.bessel import BesselEncoding
from eqaccel.patches.nequip.swapping import FORMS
from eqaccel.patches.replacement import become

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("nequip_defaults")]


def encoding(power: float = 6, **options: Any) -> Any:
    built = BesselEdgeLengthEncoding(PolynomialCutoff(power), irreps_in={"normed_edge_lengths": "0e"}, **options)
    built._output_dtype = torch.float64
    return built


def replaced(original: Any) -> Any:
    become(original, *nodes.build_form(torch.nn.Linear(1, 1), original, FORMS))
    return original


def lengths(device: torch.device, least: float) -> torch.Tensor:
    return torch.linspace(least, 1.05, 60, dtype=torch.float64, device=device).view(-1, 1).requires_grad_()


@pytest.mark.parametrize("is_trainable", [False, True])
def test_values_and_derivatives(is_trainable: bool, device: torch.device) -> None:
    results = []
    for module in (encoding(trainable=is_trainable), replaced(encoding(trainable=is_trainable))):
        # There torch.sinc has no right second derivative: by lengths it is zero, and by frequencies NaN.
        x, module = lengths(device, 0.01 if is_trainable else 0.0), module.to(device)
        found = module({module.norm_length_field: x})
        values = [found["edge_cutoff"], found[module.edge_invariant_field]]
        inputs = (x, *module.parameters())
        first = grad(sum((v**3).sum() for v in values), inputs, create_graph=True)
        second = grad(sum((g[1:] if len(g) > 1 else g).square().sum() for g in first), inputs)
        results.append([*values, *first, second[0][1:], *second[1:]])
    assert isinstance(module, BesselEncoding)
    assert len(results[1]) == (6 if not is_trainable else 8) - 2
    for value, expected in zip(results[1], results[0], strict=True):
        assert_close(value, expected)


@pytest.mark.parametrize(("is_packaged", "dtype"), [(False, "float32"), (True, "float64")])
def test_model(is_packaged: bool, dtype: str, tmp_path: Path) -> None:
    plain = nm.model(dtype=dtype)
    expected = plain(nm.data())
    if is_packaged:
        plain = nm.packaged(plain, tmp_path / "model.nequip.zip")
    fast = patched(plain)
    assert sum(isinstance(module, BesselEncoding) for module in fast.modules()) == 1
    outputs = fast(nm.data())
    for name in ("total_energy", "forces", "stress", "edge_cutoff"):
        if name in expected:
            assert outputs[name].dtype == expected[name].dtype
            if dtype == "float64":
                assert_close(outputs[name], expected[name])


@pytest.mark.parametrize("is_trainable", [False, True])
def test_training(is_trainable: bool) -> None:
    gradients = []
    for change in (lambda model: model, patched):
        model = change(nm.model(bessel_trainable=is_trainable)).train()
        loss = (model(nm.data())["forces"] ** 2).sum()
        gradients.append(grad(loss, list(model.parameters()), allow_unused=True))
    assert any("bessel_weights" in name for name, _ in model.named_parameters()) == is_trainable
    assert_same_gradients(gradients[1], gradients[0])


@pytest.mark.parametrize("power", [2.5, math.pi])
def test_other_cutoffs_are_left(power: float) -> None:
    with pytest.raises(PatchError, match=f"no kernel for a cutoff of power {power:g}"):
        nodes.build_form(torch.nn.Linear(1, 1), encoding(power), FORMS)


def test_powers_that_are_set() -> None:
    """The cutoff is no module that the kernels call: its power is a number in it."""
    plain, fast = encoding(), replaced(encoding())
    results = []
    for module in (plain, fast):
        module.cutoff.p = 4.0
        data = module({module.norm_length_field: lengths(torch.device("cpu"), 0.0)})
        results.append((data["edge_cutoff"], data[module.edge_invariant_field]))
    assert isinstance(fast, BesselEncoding)
    for value, expected in zip(*results, strict=True):
        assert_close(value, expected)


def test_report(device: torch.device) -> None:
    model = nm.model(dtype="float32").to(device)
    for found, note in ((report(model), "left: not patched yet"), (report(patched(model)), "eqaccel.RadialBasis")):
        (row,) = (row for row in found.rows if row.kind == "BesselEdgeLengthEncoding")
        assert note in row.note
    assert row.accelerated


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_positions_in_single_precision(dtype: str, device: torch.device) -> None:
    """NequIP has them in double precision, but takes them from who has not."""
    results = []
    for model in (nm.model(dtype=dtype), patched(nm.model(dtype=dtype))):
        data = nm.data(device=device)
        rounded = {name: t.float() if t.is_floating_point() else t for name, t in data.items()}
        results.append(model.to(device)(rounded))
    for name in ("total_energy", "forces", "stress"):
        plain, found = (result[name] for result in results)
        assert found.dtype == plain.dtype
        torch.testing.assert_close(found, plain, rtol=0, atol=3e-5 * float(plain.abs().max()))

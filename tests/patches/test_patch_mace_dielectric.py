"""MACE models of dipoles and polarizabilities, which differentiate a result several times over."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("mace", reason="needs mace-torch")

import mace_models as mm
from e3nn.o3._spherical_harmonics import _spherical_harmonics
from patch_checks import assert_close, assert_same_gradients

from eqaccel import patch

pytestmark = pytest.mark.filterwarnings("ignore")
Model = torch.nn.Module


def outputs(model: Model, training: bool = False) -> dict[str, torch.Tensor]:
    molecule = mm.batch(model, mm.structures()[1:])
    return model(molecule, compute_dielectric_derivatives=True, training=training)


def test_outputs_and_derivatives() -> None:
    value, expected = outputs(patch(mm.dielectric_model())), outputs(mm.dielectric_model())
    for name in ("charges", "dipole", "polarizability", "polarizability_sh", "dmu_dr", "dalpha_dr"):
        assert_close(value[name], expected[name])


def test_wrong_derivatives_of_specialised_functions_are_no_truth() -> None:
    """From the second call on, torch's own program of e3nn's harmonics may give this model other gradients."""
    model = mm.dielectric_model()

    def gradients() -> tuple[torch.Tensor, ...]:
        values = outputs(model, training=True)
        loss = (values["dmu_dr"] ** 2).sum() + (values["dalpha_dr"] ** 2).sum()
        return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)

    _spherical_harmonics._debug_flush_compilation_cache()
    first, *_ = [gradients() for _ in range(3)]
    patch(model)
    assert_same_gradients(gradients(), first)

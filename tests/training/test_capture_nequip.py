"""Steps of training of NequIP models that are recorded, in batches with and without cells."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("nequip", reason="needs nequip")

import nequip_models
from patch_checks import assert_close, assert_same_gradients, patched
from torch import Tensor
from training_recordings import captured, same_model

pytestmark = pytest.mark.usefixtures("nequip_defaults")


def batch(model: torch.nn.Module, periodic: bool, is_smaller: bool = False) -> dict[str, Tensor]:
    """A crystal and a molecule, as a data loader of NequIP's joins them; or two molecules without cells."""
    crystal, molecule = nequip_models.structures()
    frames = [crystal if periodic else molecule.copy(), molecule[:-1] if is_smaller else molecule]
    for atoms in frames:
        atoms.pbc = periodic
    data = nequip_models.data(frames, next(model.parameters()).device)
    if not periodic:
        for name in ("cell", "edge_cell_shift"):
            data.pop(name, None)
    return data


def gradients_of(model: torch.nn.Module, data: dict[str, Tensor]) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    model.zero_grad()
    output = model(data)
    loss = output["total_energy"].square().mean() + output["forces"].square().mean()
    if "cell" in data:
        loss = loss + output["stress"].square().mean()
    loss.backward()
    return loss.detach(), tuple(p.grad for p in model.parameters())


@pytest.mark.parametrize("periodic", [True, False])
def test_losses_and_gradients_are_those_of_ordinary_calls(
    periodic: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = patched(nequip_models.model().to(device)).train()
    plain = same_model(model)
    recorder = captured(monkeypatch, model)
    for number, is_smaller in enumerate([False, False, True, False]):
        data = batch(model, periodic, is_smaller)
        loss, gradients = gradients_of(model, data)
        right_loss, right = gradients_of(plain, data)
        assert_close(loss, right_loss)
        assert_same_gradients(gradients, right)
        assert recorder.replays == number
    assert recorder.recordings == 1


def test_evaluations_are_ordinary_calls(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model = patched(nequip_models.model().to(device)).eval()
    recorder = captured(monkeypatch, model)
    data = batch(model, True)
    for _ in range(3):
        model(data)
    assert not recorder.ordinary
    assert recorder.replays == 0

"""Steps of training that are recorded: losses and gradients of the ordinary calls, and what keeps a step from it."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch

pytest.importorskip("mace", reason="needs mace-torch")

import mace_models  # first: imports mace before e3nn
from mace.modules import WeightedEnergyForcesStressLoss
from patch_checks import RELATIVE, assert_close, assert_same_gradients, patched
from torch import Tensor
from training_recordings import captured, same_model

import eqaccel
from eqaccel.errors import PatchError, StepWarning
from eqaccel.training import recorder as module


def loss_of(model: Any, data: dict[str, Tensor], **requests: bool) -> Tensor:
    """Mean squares of energies, forces and, if asked for, stresses: a mean sees how many rows there are."""
    output = model(dict(data), training=True, compute_force=True, **requests)
    terms = [output["energy"].square().mean(), output["forces"].square().mean()]
    if requests:
        terms.append(output["stress"].square().mean())
    return torch.stack(terms).sum()


def gradients_of(model: torch.nn.Module, data: dict[str, Tensor], **requests: bool) -> tuple[Tensor, tuple[Any, ...]]:
    model.zero_grad()
    loss = loss_of(model, data, **requests)
    loss.backward()
    return loss.detach(), tuple(p.grad for p in model.parameters())


def tiny(device: torch.device) -> torch.nn.Module:
    return patched(mace_models.energy_model(**mace_models.TINY).to(device))


def batches(model: torch.nn.Module) -> list[dict[str, Tensor]]:
    """Two batches of two structures each; the second has fewer atoms and edges, and fits the memory of the first."""
    crystal, molecule = mace_models.structures()
    moved = crystal.copy()
    moved.rattle(0.05, seed=5)
    return [mace_models.batch(model, [moved, molecule]), mace_models.batch(model, [crystal, molecule[:-1]])]


@pytest.mark.parametrize("interaction", mace_models.INTERACTIONS)
def test_losses_and_gradients_are_those_of_ordinary_calls(
    interaction: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_kernels = mace_models.TINY | {"hidden_irreps": "4x0e+4x1o"}
    model = patched(mace_models.energy_model(interaction, **few_kernels).to(device))
    plain = same_model(model)
    recorder = captured(monkeypatch, model)
    first, second = batches(model)
    for number, data in enumerate([first, first, second, first, second]):
        requests = {"compute_stress": True}
        loss, gradients = gradients_of(model, data, **requests)
        right_loss, right = gradients_of(plain, data, **requests)
        assert_close(loss, right_loss)
        assert_same_gradients(gradients, right)
        assert recorder.replays == number
    assert recorder.recordings == 1
    assert "4 calls replayed, 1 recordings" in str(recorder)
    assert not recorder.not_captured


def test_trains_as_ordinary_calls_do(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an optimizer, clipped gradients, averaged weights and evaluations in between."""
    model = tiny(device)
    plain = same_model(model)
    recorder = captured(monkeypatch, model)
    losses: dict[int, list[float]] = {}
    for which, trained in enumerate((model, plain)):
        optimizer = torch.optim.Adam(trained.parameters(), lr=1e-2)
        averaged = torch.optim.swa_utils.AveragedModel(trained)
        losses[which] = []
        for number in range(20):
            data = batches(trained)[number % 5 // 3]
            optimizer.zero_grad(set_to_none=number % 3 > 0)
            loss = loss_of(trained, data)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
            optimizer.step()
            averaged.update_parameters(trained)
            energies = [model(dict(data))["energy"].detach().sum() for model in (trained, averaged.module)]
            losses[which] += map(float, (loss.detach(), *energies))
    # Each of 20 steps adds the error of its gradients, which Adam divides by their size: that of a gradient which is a
    # fiftieth of the largest counts fifty times.
    assert torch.allclose(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=20 * 50 * RELATIVE, atol=0.0)
    assert recorder.replays == 19
    assert recorder.recordings == 1


def test_gradients_add_up(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a parameter has stay what they are when the next ones are computed."""
    model = tiny(device)
    plain = same_model(model)
    captured(monkeypatch, model)
    for trained in (model, plain):
        loss_of(trained, batches(trained)[0]).backward()
        trained.zero_grad()
        for data in batches(trained):
            loss_of(trained, data).backward()
    assert_same_gradients(tuple(p.grad for p in model.parameters()), tuple(p.grad for p in plain.parameters()))


def test_outputs_that_wait_are_not_overwritten(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(device)
    plain = same_model(model)
    recorder = captured(monkeypatch, model)
    data = batches(model)[0]
    gradients_of(model, data)
    model.zero_grad()
    first, second = loss_of(model, data), loss_of(model, batches(model)[1])
    assert recorder.ordinary["outputs of another batch wait for their backward pass"] == 1
    (first + second).backward()
    (loss_of(plain, data) + loss_of(plain, batches(model)[1])).backward()
    assert_same_gradients(tuple(p.grad for p in model.parameters()), tuple(p.grad for p in plain.parameters()))
    # Outputs that nobody has any more wait for nothing.
    unused = loss_of(model, data)
    del unused
    gc.collect()
    loss_of(model, data)
    assert recorder.replays == 3


def test_outputs_that_are_never_differentiated(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are recorded again before their gradient is, if parameters have changed."""
    model = tiny(device)
    plain = same_model(model)
    recorder = captured(monkeypatch, model)
    data = batches(model)[0]
    for _ in range(3):
        loss_of(model, data)
    assert (recorder.replays, recorder.recordings) == (2, 1)
    with torch.no_grad():
        for trained in (model, plain):
            for parameter in trained.parameters():
                parameter.mul_(1.1)
    assert_same_gradients(gradients_of(model, data)[1], gradients_of(plain, data)[1])
    assert (recorder.replays, recorder.recordings) == (3, 2)
    assert not recorder.not_captured


def test_float32(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Energies of atoms are in float64 there, and as exact as float32 is."""
    model = patched(mace_models.energy_model(**mace_models.TINY, dtype=torch.float32).to(device))
    plain = same_model(model)
    recorder = captured(monkeypatch, model)
    data = batches(model)[0]
    for _ in range(3):
        loss, gradients = gradients_of(model, data)
    right_loss, right = gradients_of(plain, data)
    assert recorder.replays == 2
    assert not recorder.not_captured
    bound = 64 * torch.finfo(torch.float32).eps
    assert float((loss - right_loss).abs()) <= bound * float(right_loss)
    ours, theirs = (torch.cat([g.flatten() for g in side if g is not None]) for side in (gradients, right))
    assert float((ours - theirs).abs().max()) <= bound * float(theirs.abs().sum())


def test_refuses_another_backward_pass(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(device)
    captured(monkeypatch, model)
    data = batches(model)[0]
    gradients_of(model, data)
    loss = loss_of(model, data)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="expected one backward pass"):
        loss.backward()


def test_refuses_parameters_that_changed_before_the_backward_pass(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(device)
    captured(monkeypatch, model)
    data = batches(model)[0]
    gradients_of(model, data)
    loss = loss_of(model, data)
    with torch.no_grad():
        next(model.parameters()).mul_(1.1)
    with pytest.raises(RuntimeError, match="expected parameters as they were"):
        loss.backward()


def test_the_gradient_of_other_outputs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(device)
    plain = same_model(model)
    recorder = captured(monkeypatch, model)
    data = batches(model)[0]
    for _ in range(3):
        gradients_of(model, data)
    found = []
    for trained in (model, plain):
        trained.zero_grad()
        trained(dict(data), training=True, compute_force=True)["energy"].sum().backward()
        found.append(tuple(p.grad for p in trained.parameters()))
    assert_same_gradients(*found)
    assert recorder.ordinary["the gradient of other outputs than before"] == 1


def test_follows_the_model(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters that are frozen, exchanged or converted, and patches that are taken back."""
    model = tiny(device)
    recorder = captured(monkeypatch, model)

    def check() -> None:
        for _ in range(3):
            data = batches(model)[0]
            plain = eqaccel.unpatch(same_model(model))
            _, gradients = gradients_of(model, data)
            assert_same_gradients(gradients, gradients_of(plain, data)[1])

    check()
    name, parameter = next((n, p) for n, p in model.named_parameters() if n.endswith("linear_up.weight"))
    parameter.requires_grad_(False)
    parameter.grad = None
    check()
    parameter.requires_grad_(True)
    owner = model.get_submodule(name.rpartition(".")[0])
    owner.weight = torch.nn.Parameter(parameter.detach() * 1.5)
    check()
    assert recorder.recordings == 3
    eqaccel.unpatch(model)
    replays = recorder.replays
    check()
    assert recorder.replays == replays
    patched(model)
    check()
    assert recorder.recordings == 4


def test_says_what_is_not_recorded(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(device)
    recorder = captured(monkeypatch, model)
    data = batches(model)[0]
    for _ in range(3):
        model(dict(data), training=True, compute_force=True, compute_edge_forces=True)
        model(dict(data) | {"displacement": None}, training=True, compute_force=True)
        model(dict(data), True, compute_force=True)
    handle = model.interactions[0].register_forward_hook(lambda *_: None)
    loss_of(model, data)
    handle.remove()
    model.requires_grad_(False)
    model(dict(data), training=True, compute_force=True)
    assert recorder.replays == 0
    text = str(recorder)
    for reason in ("compute_edge_forces", "a displacement", "positional arguments", "has hooks", "nothing is trained"):
        assert reason in text
    recorder.release()
    model(dict(data), training=True, compute_force=True)
    assert str(recorder) == text


def test_a_recording_that_fails(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Says so once, and computes the ordinary way."""
    model = tiny(device)
    plain = same_model(model)
    recorder = captured(monkeypatch, model)

    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("eqaccel.training.recorder.Recording", fails)
    data = batches(model)[0]
    gradients_of(model, data)
    with pytest.warns(StepWarning, match="out of memory"):
        found = gradients_of(model, data)
    assert_same_gradients(found[1], gradients_of(plain, data)[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients_of(model, data)
    assert "nothing is recorded: recording failed (OutOfMemoryError" in str(recorder)


def test_a_recording_that_is_wrong(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forces or gradients that are off by a little more than rounding are not used."""
    for method in ("forward", "backward"):
        model = tiny(device)
        plain = same_model(model)
        captured(monkeypatch, model)
        right = getattr(module.Recording, method)

        def wrong(self: Any, *args: Any, right: Any = right) -> Any:
            return [None if tensor is None else tensor * (1 + 1e-6) for tensor in right(self, *args)]

        with monkeypatch.context() as patch:
            patch.setattr(module.Recording, method, wrong)
            data = batches(model)[0]
            gradients_of(model, data)
            with pytest.warns(StepWarning, match="differs by"):
                found = gradients_of(model, data)
        assert_same_gradients(found[1], gradients_of(plain, data)[1])


def test_copies_and_files_know_nothing_of_it(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(device)
    recorder = captured(monkeypatch, model)
    data = batches(model)[0]
    for _ in range(2):
        gradients_of(model, data)
    duplicate = same_model(model)
    for _ in range(2):
        gradients_of(duplicate, data)
    assert recorder.replays == 1


def test_needs_a_patched_model() -> None:
    with pytest.raises(PatchError, match="expected one patched model"):
        eqaccel.training.capture(mace_models.energy_model(**mace_models.TINY))


def test_says_so_on_a_cpu() -> None:
    model = patched(mace_models.energy_model(**mace_models.TINY))
    recorder = eqaccel.training.capture(model)
    gradients_of(model, batches(model)[0])
    assert str(recorder).splitlines()[1:] == ["1 calls the ordinary way: the model is on a CPU"]


def test_loss_of_mace(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """MACE's own loss, whose means are over rows: they are those of the batch."""
    model = tiny(device)
    plain = same_model(model)
    captured(monkeypatch, model)
    found = []
    for trained in (model, plain):
        for _ in range(2):
            trained.zero_grad()
            data = batches(trained)[0]
            output = trained(dict(data), training=True, compute_force=True, compute_stress=True)
            reference = _Reference(data)
            WeightedEnergyForcesStressLoss(1.0, 10.0, 5.0)(pred=output, ref=reference).backward()
        found.append(tuple(p.grad for p in trained.parameters()))
    assert_same_gradients(*found)


class _Reference(dict[str, Tensor]):
    """A batch of labels, all zero, as MACE's losses read it."""

    def __init__(self, data: dict[str, Tensor]) -> None:
        count = len(data["ptr"]) - 1
        like = data["positions"]
        zeros = {
            "energy": like.new_zeros(count),
            "forces": like.new_zeros(like.shape),
            "stress": like.new_zeros(count, 3, 3),
        }
        weights = ("weight", "energy_weight", "forces_weight", "stress_weight")
        super().__init__({"ptr": data["ptr"], **zeros, **{name: like.new_ones(count) for name in weights}})

    def __getattr__(self, name: str) -> Tensor:
        return self[name]

"""MACE's radial networks with eqaccel's matrix product: the same numbers, names and files."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("mace", reason="needs mace-torch")

import mace_models as mm
from e3nn.nn import FullyConnectedNet
from mace.modules.radial import RadialMLP
from patch_checks import assert_close, duplicated, patched
from radial_checks import assert_first_layers_merge, assert_layers_agree

from eqaccel import report, unpatch
from eqaccel.ops import RadialNetwork, has_matrix_kernel
from eqaccel.patches.mace.swapping import RADIAL_FORMS
from eqaccel.patches.radial import MergedLayers, NarrowLayer, merged, radial_swaps
from eqaccel.patches.radial_e3nn import E3nnRadialLayer, RadialSiluLayer
from eqaccel.patches.replacement import Replacement
from eqaccel.patches.torch_state import default_dtype

pytestmark = pytest.mark.filterwarnings("ignore")
FULL = {"compute_force": True, "compute_stress": True}


@pytest.mark.parametrize("kind", ["act", "linear", "out_act", "variances", "RadialMLP"])
def test_values_and_derivatives(kind: str, device: torch.device) -> None:
    options = {"out_act": {"out_act": True}, "variances": {"variance_in": 2.0, "variance_out": 3.0, "out_act": True}}
    with default_dtype(torch.float64):
        torch.manual_seed(0)
        act = None if kind == "linear" else torch.nn.functional.silu
        if kind == "RadialMLP":
            network = RadialMLP([4, 8, 8, 12])
        else:
            network = FullyConnectedNet([4, 8, 8, 12], act, **options.get(kind, {}))
    assert_layers_agree(network.to(device), 3, RADIAL_FORMS)


@pytest.mark.parametrize("kind", [NarrowLayer, MergedLayers])
@pytest.mark.parametrize("variance", [1.0, 2.0])
def test_first_layers_are_one_kernel_with_their_activations(
    variance: float, kind: type[torch.nn.Module], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RadialNetwork, "has_kernel", lambda *_: kind is MergedLayers)
    with default_dtype(torch.float64):
        torch.manual_seed(0)
        network = FullyConnectedNet(
            [4, 8, 8, 12], torch.nn.functional.silu, variance_in=variance, variance_out=variance
        )
    assert_first_layers_merge(network.to(device), RADIAL_FORMS, kind)


@pytest.mark.parametrize("kind", [NarrowLayer, MergedLayers])
def test_an_activation_that_is_exchanged_ends_it(kind: type[torch.nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RadialNetwork, "has_kernel", lambda *_: kind is MergedLayers)
    with default_dtype(torch.float64):
        network = FullyConnectedNet([4, 24, 24, 12], torch.nn.functional.silu)
        for swap in list(radial_swaps(network, RADIAL_FORMS)):
            swap.apply()
        assert isinstance(merged(list(network))[0], kind)
        other = FullyConnectedNet([4, 24, 24, 12], torch.tanh)
        other.layer1.act = network.layer1.act
        network.layer0.act = other.layer0.act
        other.load_state_dict(network.state_dict())
        x = torch.linspace(-1.0, 1.0, 20).view(5, 4)
        layers = merged(list(network))
        assert not any(isinstance(layer, (NarrowLayer, MergedLayers)) for layer in layers)
        assert_close(torch.nn.Sequential(*layers)(x), other(x))


def test_a_layer_without_an_activation_ends_what_is_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RadialNetwork, "has_kernel", lambda *_: True)
    with default_dtype(torch.float64):
        network = FullyConnectedNet([4, 8, 8, 8, 12], torch.nn.functional.silu)
        network.layer1.act = None
        x = torch.linspace(-1.0, 1.0, 20).view(5, 4)
        expected = network(x)
        for swap in list(radial_swaps(network, RADIAL_FORMS)):
            swap.apply()
        layers = merged(list(network))
        assert not any(isinstance(layer, MergedLayers) for layer in layers)
        assert_close(torch.nn.Sequential(*layers)(x), expected)


def test_names_copies_and_checkpoints() -> None:
    plain, fast = mm.energy_model(), patched(mm.energy_model())
    kinds = (E3nnRadialLayer, RadialSiluLayer)
    assert [sum(isinstance(m, kind) for m in fast.modules()) for kind in kinds] == [2 * 1, 2 * 2]
    assert list(fast.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in fast.named_parameters()] == [name for name, _ in plain.named_parameters()]
    changed = {key: 1.5 * value if "conv_tp_weights" in key else value for key, value in plain.state_dict().items()}
    plain.load_state_dict(changed)
    for assign in (False, True):
        fast.load_state_dict(changed, assign=assign)
        assert_close(fast(mm.batch(fast))["forces"], plain(mm.batch(plain))["forces"])
    for how in ("deepcopy", "save"):
        assert_close(duplicated(fast, how)(mm.batch(plain))["forces"], plain(mm.batch(plain))["forces"])
    restored = unpatch(fast)
    assert not any(isinstance(module, Replacement) for module in restored.modules())
    assert [type(m).__name__ for m in restored.modules()] == [type(m).__name__ for m in plain.modules()]


def test_report(device: torch.device) -> None:
    model = mm.energy_model(dtype=torch.float32).to(device)
    rows = [row for row in report(model).rows if row.kind == "FullyConnectedNet"]
    assert [row.note for row in rows] == [
        "left: not patched yet, eqaccel.patch(model) replaces its matrix products and activations"
    ] * 2
    rows = [row for row in report(patched(model)).rows if row.kind == "FullyConnectedNet"]
    assert [row.path for row in rows] == ["interactions.0.conv_tp_weights", "interactions.1.conv_tp_weights"]
    fast = device.type == "cpu" or has_matrix_kernel(device, torch.float32)
    wording = "by eqaccel.MatrixProduct" if fast else "products left"
    assert all(row.accelerated and wording in row.note and "by eqaccel.ScaledSilu" in row.note for row in rows)

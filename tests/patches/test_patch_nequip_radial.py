"""NequIP's radial networks with eqaccel's matrix product: the same numbers, names and files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("nequip", reason="needs nequip")

import nequip_models as nm
from e3nn.util import jit
from nequip.nn.mlp import ScalarMLPFunction
from patch_checks import assert_close, duplicated, patched
from radial_checks import assert_first_layers_merge, assert_layers_agree

from eqaccel import export, report, unpatch
from eqaccel.ops import RadialNetwork, has_matrix_kernel
from eqaccel.patches.nequip.radial import RADIAL_FORMS, RadialScaledLinear
from eqaccel.patches.radial import MergedLayers, NarrowLayer

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("nequip_defaults")]


@pytest.mark.parametrize(
    ("options", "layers"),
    [({}, 3), ({"bias": True}, 3), ({"forward_weight_init": False}, 3), ({"parametrization": "weight_norm"}, 3)],
    ids=["plain", "bias", "backward", "parametrized"],
)
def test_values_and_derivatives(options: dict[str, object], layers: int, device: torch.device) -> None:
    torch.manual_seed(0)
    assert_layers_agree(ScalarMLPFunction(4, 12, 2, 8, **options).to(device), layers, RADIAL_FORMS)


@pytest.mark.parametrize("kind", [NarrowLayer, MergedLayers])
def test_first_layers_are_one_kernel_with_their_activations(
    kind: type[torch.nn.Module], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RadialNetwork, "has_kernel", lambda *_: kind is MergedLayers)
    torch.manual_seed(0)
    assert_first_layers_merge(ScalarMLPFunction(4, 12, 2, 8).to(device), RADIAL_FORMS, kind)


@pytest.mark.parametrize("is_packaged", [False, True], ids=["built", "packaged"])
def test_model(is_packaged: bool, tmp_path: Path) -> None:
    plain = nm.model("parity")
    expected = plain(nm.data())
    if is_packaged:
        plain = nm.packaged(plain, tmp_path / "model.nequip.zip")
    fast = patched(plain)
    layers = [m for m in fast.modules() if isinstance(m, RadialScaledLinear)]
    assert len(layers) >= 2 * nm.replaced_layers(fast)
    outputs = fast(nm.data())
    for name in ("total_energy", "forces", "stress"):
        assert_close(outputs[name], expected[name])


def test_names_copies_and_files(tmp_path: Path) -> None:
    plain, fast = nm.model(), patched(nm.model())
    assert list(fast.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in fast.named_parameters()] == [name for name, _ in plain.named_parameters()]
    expected = plain(nm.data(nm.structures()[:1]))
    for copied in (duplicated(fast, "deepcopy"), duplicated(fast, "save"), jit.script(duplicated(fast, "deepcopy"))):
        assert_close(copied(nm.data(nm.structures()[:1]))["forces"], expected["forces"])
    export(fast.requires_grad_(False), tmp_path / "model.pt")  # compares the file with the model
    restored = unpatch(fast)
    assert [type(m).__name__ for m in restored.modules()] == [type(m).__name__ for m in plain.modules()]


def test_report(device: torch.device) -> None:
    model = nm.model(dtype="float32").to(device)
    rows = [row for row in report(patched(model)).rows if row.kind == "ScalarMLPFunction"]
    assert len(rows) == nm.replaced_layers(model)
    products = device.type == "cpu" or has_matrix_kernel(device, torch.float32)
    assert all(row.accelerated and ("products left" in row.note) != products for row in rows)

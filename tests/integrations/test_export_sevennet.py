"""Exported SevenNet models: the numbers of the model they came from, with and without ghosts."""

from __future__ import annotations

import copy
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sevenn", reason="needs sevenn")

import sevennet_models as sm
from export_checks import assert_close, assert_ghosts, assert_moves_to_a_gpu, forces

import eqaccel
from eqaccel.errors import ExportError

pytestmark = pytest.mark.filterwarnings("ignore")


def arguments(data: Any) -> tuple[torch.Tensor, ...]:
    """Vectors, edges and types as an exported file takes them; SevenNet's edges start at the receiver."""
    types = torch.tensor([{6: 0, 1: 1, 8: 2}[number] for number in data["atomic_numbers"].tolist()])
    return -data["edge_vec"].detach(), data["edge_index"].flip(0), types.to(data["edge_index"].device)


THREE = {
    "_number_of_modalities": 3,
    "_modal_map": {"mpa": 2, "omat24": 0, "matpes": 1},
    "shift": {"mpa": -1.5, "omat24": 2.5, "matpes": 0.5},
    "scale": {"mpa": 1.5, "omat24": 0.5, "matpes": 2.5},
}
"""Of a model, in an order of their own."""


@pytest.mark.parametrize(
    ("kind", "modality", "changes"),
    [
        ("0", None, {}),
        ("l3i5", None, {}),
        ("mf-ompa", "omat24", {}),
        ("omni", "mpa", {}),
        *(("omni", modality, THREE) for modality in THREE["_modal_map"]),
    ],
    ids=lambda value: "" if value == {} else "three" if value is THREE else str(value),
)
def test_numbers(
    kind: str, modality: str | None, changes: dict[str, Any], device: torch.device, tmp_path: Path
) -> None:
    """In float64, also of a model in float32."""
    plain = sm.model(kind, "float64", **changes).to(device)
    eqaccel.export(eqaccel.patch(copy.deepcopy(plain), verify=False), tmp_path / "model.pt", head=modality)
    loaded = eqaccel.load_exported(tmp_path / "model.pt")
    assert loaded.metadata["family"] == "sevennet"
    assert loaded.metadata["head"] == (modality or "Default")
    assert loaded.metadata["type_names"] == ["C", "H", "O"]
    assert loaded.metadata["cutoff"] == sm.CUTOFF
    batch = [sm.data(plain, modality=modality or "", device=device) for _ in range(2)]
    given, wanted = arguments(batch[0]), sm.outputs(plain, batch[1])
    for _ in range(3):  # TorchScript profiles, then specialises
        energies, gradient = loaded(*given)
        assert energies.device.type == gradient.device.type == device.type
        assert_close(energies, wanted["atomic_energy"].detach().reshape(-1))
        assert_close(forces(gradient, given[1], len(given[2])), wanted["inferred_force"])
    assert_ghosts(loaded, given)
    if device.type == "cpu":
        assert_moves_to_a_gpu(loaded)


def test_other_options_of_models(tmp_path: Path) -> None:
    """A network reads the energy out, Bessel functions are not trained, and one number scales all energies."""
    radial = {"radial_basis_name": "bessel", "trainable_coeff": False}
    options = {"readout_as_fcn": True, "readout_fcn_hidden_neurons": [5], "readout_fcn_activation": "silu"}
    plain = sm.model("0", "float64", radial_basis=radial, shift=-1.5, scale=2.0, **options)
    model = eqaccel.patch(copy.deepcopy(plain), verify=False)
    wanted = sm.outputs(plain, sm.data(plain))
    found = sm.outputs(model, sm.data(model))["inferred_force"]
    assert_close(found, wanted["inferred_force"])
    eqaccel.export(model, tmp_path / "model.pt")
    loaded = eqaccel.load_exported(tmp_path / "model.pt")
    energies, _ = loaded(*arguments(sm.data(plain)))
    assert_close(energies, wanted["atomic_energy"].detach().reshape(-1))
    assert_moves_to_a_gpu(loaded)


def test_single_precision(device: torch.device, tmp_path: Path) -> None:
    plain = sm.model("omni").to(device)
    model = eqaccel.patch(copy.deepcopy(plain), verify=False)
    wanted = sm.outputs(plain, sm.data(plain, device=device))["atomic_energy"].detach().reshape(-1).double()
    for dtype in ("float32", "float64"):
        assert eqaccel.export(model, tmp_path / "model.pt", dtype=dtype, head="omat24")["dtype"] == dtype
        vectors, edge_index, types = arguments(sm.data(plain, device=device))
        vectors = vectors.to(getattr(torch, dtype))
        energies, _ = eqaccel.load_exported(tmp_path / "model.pt")(vectors, edge_index, types)
        assert energies.dtype == torch.float64
        assert_close(energies, wanted, 256 * torch.finfo(torch.float32).eps)


def test_aotinductor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program that is compiled into a package; compiling takes half a minute, and is the same for every kind."""
    programs = []

    def keep(program: Any, package_path: str, inductor_configs: Any) -> None:
        programs.append(program.module())
        with zipfile.ZipFile(package_path, "w") as archive:
            archive.writestr("empty", "")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", keep)
    model = eqaccel.patch(sm.model("omni", "float64"), verify=False)
    without_hooks = copy.deepcopy(model)  # a package stands in for the embedding, whose hook sees to its dtype
    for module in without_hooks.modules():
        module._forward_hooks.clear()
    eqaccel.export(without_hooks, tmp_path / "model.pt2", "aotinductor", head="omat24", verify=False)
    given = arguments(sm.data(model))
    energies, gradient = programs[0](*given)
    wanted = sm.outputs(model, sm.data(model))
    assert_close(energies, wanted["atomic_energy"].detach().reshape(-1))
    assert_close(forces(gradient, given[1], len(given[2])), wanted["inferred_force"])


class Unknown(torch.nn.Module):
    """A module that SevenNet does not have."""

    def forward(self, data: Any) -> Any:
        return data


def test_models_that_can_not_be_exported(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    with pytest.raises(ExportError, match=r"0_convolution = IrrepsConvolution; call eqaccel\.patch"):
        eqaccel.export(sm.model("0"), file)
    model = eqaccel.patch(sm.model("omni"), verify=False)
    with pytest.raises(ExportError, match="head: expected one of 'mpa', 'omat24', got None"):
        eqaccel.export(model, file)
    layer = model._modules["1_convolution"]
    layer.key_filter = "other"
    with pytest.raises(ExportError, match="layers that read what SevenNet's do"):
        eqaccel.export(model, file, head="mpa")
    layer.key_filter = "edge_attr"
    model.reduce_total_enegy.constant = 2.0
    with pytest.raises(ExportError, match="scaled per atom and summed"):
        eqaccel.export(model, file, head="mpa")
    model.add_module("more", Unknown())
    with pytest.raises(ExportError, match="got more = Unknown"):
        eqaccel.export(model, file, head="mpa")
    model.delete_module_by_key("more")
    model.type_map = None
    with pytest.raises(ExportError, match="expected a type_map"):
        eqaccel.export(model, file, head="mpa")

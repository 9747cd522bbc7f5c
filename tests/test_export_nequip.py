"""Exported NequIP models: the numbers of the model they came from, with and without ghosts."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

pytest.importorskip("nequip", reason="needs nequip")
pytest.importorskip("eqaccel.patches.nequip", reason="needs patches for NequIP")

import nequip_models as nm
from export_checks import assert_close, assert_ghosts, forces

import eqaccel
from eqaccel.errors import ExportError

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("nequip_defaults")]


def arguments(data: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Vectors, edges and types as an exported file takes them; NequIP's edges start at the receiver."""
    receivers, senders = data["edge_index"]
    shifts = torch.einsum("ei,eij->ej", data["edge_cell_shift"], data["cell"][data["batch"][receivers]])
    vectors = data["pos"][receivers] - data["pos"][senders] - shifts
    return vectors, torch.stack([senders, receivers]), data["atom_types"].reshape(-1)


@pytest.mark.parametrize("kind", ["small", "parity"])
def test_numbers(kind: str, tmp_path: Path) -> None:
    plain = nm.model(kind)
    eqaccel.export(eqaccel.patch(copy.deepcopy(plain), verify=False), tmp_path / "model.pt")
    loaded = eqaccel.load_exported(tmp_path / "model.pt")
    assert loaded.metadata["family"] == "nequip"
    assert loaded.metadata["type_names"] == nm.ELEMENTS
    assert loaded.metadata["cutoff"] == nm.CUTOFF
    wanted = plain(nm.data())
    vectors, edge_index, types = arguments(nm.data())
    for _ in range(3):  # TorchScript profiles, then specialises
        energies, gradient = loaded(vectors, edge_index, types)
        assert_close(energies, wanted["atomic_energy"].detach().reshape(-1))
        assert_close(forces(gradient, edge_index, len(types)), wanted["forces"])


def test_single_precision(tmp_path: Path) -> None:
    plain = nm.model("small", "float32")
    model = eqaccel.patch(copy.deepcopy(plain), verify=False)
    assert eqaccel.export(model, tmp_path / "model.pt")["dtype"] == "float32"
    vectors, edge_index, types = arguments(nm.data())
    energies, _ = eqaccel.load_exported(tmp_path / "model.pt")(vectors.float(), edge_index, types)
    assert energies.dtype == torch.float32
    wanted = plain(nm.data())["atomic_energy"].detach().reshape(-1)
    assert_close(energies.double(), wanted, 256 * torch.finfo(torch.float32).eps)
    with pytest.raises(ExportError, match=r"expected torch.float32, got torch.float64; leave dtype out"):
        eqaccel.export(model, tmp_path / "model.pt", dtype="float64")


def test_ghosts(tmp_path: Path) -> None:
    model = eqaccel.patch(nm.model(), verify=False)
    eqaccel.export(model, tmp_path / "model.pt", verify=False)
    assert_ghosts(eqaccel.load_exported(tmp_path / "model.pt"), arguments(nm.data()))


def test_a_packaged_model(tmp_path: Path) -> None:
    model = eqaccel.patch(nm.packaged(nm.model(), tmp_path / "package.nequip.zip"), verify=False)
    eqaccel.export(model, tmp_path / "model.pt")


@pytest.mark.slow
def test_aotinductor(tmp_path: Path) -> None:
    model = eqaccel.patch(nm.model(num_layers=2, num_features=[4, 2]), verify=False)
    eqaccel.export(model, tmp_path / "model.pt2", "aotinductor")
    vectors, edge_index, types = arguments(nm.data())
    energies, gradient = eqaccel.load_exported(tmp_path / "model.pt2")(vectors, edge_index, types)
    wanted = model(nm.data())
    assert_close(energies, wanted["atomic_energy"].detach().reshape(-1))
    assert_close(forces(gradient, edge_index, len(types)), wanted["forces"])


def test_models_that_can_not_be_exported(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"layer0_convnet.conv.tp_scatter = TensorProductScatter; call eqaccel.patch"):
        eqaccel.export(nm.model(), tmp_path / "model.pt")

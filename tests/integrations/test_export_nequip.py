"""Exported NequIP models: the numbers of the model they came from, with and without ghosts."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("nequip", reason="needs nequip")
pytest.importorskip("eqaccel.patches.nequip", reason="needs patches for NequIP")

import nequip_models as nm
from export_checks import assert_close, assert_ghosts, assert_moves_to_a_gpu, forces

import eqaccel
from eqaccel.__main__ import main
from eqaccel.errors import ExportError

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("nequip_defaults")]


def arguments(data: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Vectors, edges and types as an exported file takes them; NequIP's edges start at the receiver."""
    receivers, senders = data["edge_index"]
    shifts = torch.einsum("ei,eij->ej", data["edge_cell_shift"], data["cell"][data["batch"][receivers]])
    vectors = data["pos"][receivers] - data["pos"][senders] - shifts
    return vectors, torch.stack([senders, receivers]), data["atom_types"].reshape(-1)


@pytest.mark.parametrize("kind", ["small", "parity"])
def test_numbers(kind: str, device: torch.device, tmp_path: Path) -> None:
    plain = nm.model(kind).to(device)
    eqaccel.export(eqaccel.patch(copy.deepcopy(plain), verify=False), tmp_path / "model.pt")
    loaded = eqaccel.load_exported(tmp_path / "model.pt")
    assert loaded.metadata["family"] == "nequip"
    assert loaded.metadata["type_names"] == nm.ELEMENTS
    assert loaded.metadata["cutoff"] == nm.CUTOFF
    assert loaded.metadata["device"] == device.type
    data = nm.data(device=device)
    wanted = plain(nm.data(device=device))
    vectors, edge_index, types = arguments(data)
    edges = data["batch"][edge_index[1]] == 0  # of the crystal
    for _ in range(3):  # TorchScript profiles, then specialises
        energies, gradient = loaded(vectors, edge_index, types)
        assert energies.device.type == gradient.device.type == device.type
        assert_close(energies, wanted["atomic_energy"].detach().reshape(-1))
        assert_close(forces(gradient, edge_index, len(types)), wanted["forces"])
        virial = vectors[edges].T @ gradient[edges]
        assert_close((virial + virial.T) / (2 * torch.linalg.det(data["cell"][0]).abs()), wanted["stress"][0])


@pytest.mark.parametrize("kind", ["small", "parity"])
def test_nothing_is_left_on_the_cpu(kind: str, tmp_path: Path) -> None:
    eqaccel.export(eqaccel.patch(nm.model(kind), verify=False), tmp_path / "model.pt", verify=False)
    assert_moves_to_a_gpu(eqaccel.load_exported(tmp_path / "model.pt"))


@pytest.mark.gpu
@pytest.mark.parametrize(("made_for", "opened_on"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_files_move_between_devices(made_for: str, opened_on: str, tmp_path: Path) -> None:
    model = eqaccel.patch(nm.model(), verify=False)
    assert eqaccel.export(model, tmp_path / "model.pt", device=made_for)["device"] == made_for
    results = []
    for name in (made_for, opened_on):
        loaded = eqaccel.load_exported(tmp_path / "model.pt", device=name)
        results.append([value.cpu() for value in loaded(*arguments(nm.data(device=name)))])
    for value, wanted in zip(*results, strict=True):
        assert_close(value, wanted)


def test_single_precision(device: torch.device, tmp_path: Path) -> None:
    plain = nm.model("small", "float32").to(device)
    model = eqaccel.patch(copy.deepcopy(plain), verify=False)
    assert eqaccel.export(model, tmp_path / "model.pt")["dtype"] == "float32"
    vectors, edge_index, types = arguments(nm.data(device=device))
    energies, _ = eqaccel.load_exported(tmp_path / "model.pt")(vectors.float(), edge_index, types)
    assert energies.dtype == torch.float64
    wanted = plain(nm.data(device=device))["atomic_energy"].detach().reshape(-1)
    assert_close(energies, wanted, 256 * torch.finfo(torch.float32).eps)
    with pytest.raises(ExportError, match=r"expected torch.float32, got torch.float64; leave dtype out"):
        eqaccel.export(model, tmp_path / "model.pt", dtype="float64")


def test_energies_of_isolated_atoms_keep_their_digits(device: torch.device, tmp_path: Path) -> None:
    """A float32 model of all electrons, whose constants NequIP adds in float64: the file does too."""
    shifts = dict(zip(nm.ELEMENTS, (-13.605693, -10345.123456789, -20042.987654321), strict=True))
    plain = nm.model("small", "float32", per_type_energy_shifts=shifts).to(device)
    eqaccel.export(eqaccel.patch(copy.deepcopy(plain), verify=False), tmp_path / "model.pt")
    vectors, edge_index, types = arguments(nm.data(device=device))
    energies, _ = eqaccel.load_exported(tmp_path / "model.pt")(vectors.float(), edge_index, types)
    constants = torch.tensor(list(shifts.values()), dtype=torch.float64, device=device)[types]
    wanted = plain(nm.data(device=device))["atomic_energy"].detach().reshape(-1) - constants
    assert_close(energies - constants, wanted, 256 * torch.finfo(torch.float32).eps)


def test_ghosts(device: torch.device, tmp_path: Path) -> None:
    model = eqaccel.patch(nm.model().to(device), verify=False)
    eqaccel.export(model, tmp_path / "model.pt", verify=False)
    assert_ghosts(eqaccel.load_exported(tmp_path / "model.pt"), arguments(nm.data(device=device)))


def test_a_packaged_model(tmp_path: Path) -> None:
    model = eqaccel.patch(nm.packaged(nm.model(), tmp_path / "package.nequip.zip"), verify=False)
    eqaccel.export(model, tmp_path / "model.pt")


def test_the_command_line_exports_packages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "package.nequip.zip", tmp_path / "model.pt"
    nm.packaged(nm.model(), source)
    assert main(["export", str(source), str(target)]) == 0
    assert json.loads(capsys.readouterr().out) == eqaccel.load_exported(target).metadata
    shutil.copy(source, tmp_path / "renamed.zip")
    assert main(["export", str(tmp_path / "renamed.zip"), str(target)]) == 1
    assert "a package of NequIP has to be named *.nequip.zip" in capsys.readouterr().err


@pytest.mark.slow
def test_aotinductor(tmp_path: Path) -> None:
    model = eqaccel.patch(nm.model(num_layers=2, num_features=[4, 2]), verify=False)
    with torch._inductor.config.patch("aot_inductor.precompile_headers", False):  # one package is built faster without
        eqaccel.export(model, tmp_path / "model.pt2", "aotinductor")
    vectors, edge_index, types = arguments(nm.data())
    energies, gradient = eqaccel.load_exported(tmp_path / "model.pt2")(vectors, edge_index, types)
    wanted = model(nm.data())
    assert_close(energies, wanted["atomic_energy"].detach().reshape(-1))
    assert_close(forces(gradient, edge_index, len(types)), wanted["forces"])


def test_models_that_can_not_be_exported(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"layer0_convnet.conv.tp_scatter = TensorProductScatter; call eqaccel.patch"):
        eqaccel.export(nm.model(), tmp_path / "model.pt")

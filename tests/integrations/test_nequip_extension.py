"""The modifier `enable_eqaccel` in NequIP's own ways of changing, training, packaging and compiling models."""

from __future__ import annotations

import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest
import torch
from folders import SUPPORT

pytest.importorskip("nequip", reason="needs nequip")

import nequip_models as nm
from ase import Atoms
from ase.build import bulk
from documents import inline_codes
from nequip.integrations.ase import NequIPCalculator
from nequip.model import modify
from nequip.model.modify_utils import get_all_modifiers, only_apply_persistent_modifiers
from nequip.model.saved_models import load_saved_model
from nequip.train import NequIPLightningModule
from patch_checks import RELATIVE, assert_close

from eqaccel import patch, report
from eqaccel.integrations import nequip_extension

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("nequip_defaults")]

MODIFIERS = [{"modifier": "enable_eqaccel"}]
TRAINING = SUPPORT / "nequip_training.yaml"


@pytest.mark.parametrize("is_packaged", [False, True], ids=["built", "packaged"])
def test_modifier(is_packaged: bool, tmp_path: Path) -> None:
    model = nm.packaged(nm.model(), tmp_path / "model.nequip.zip") if is_packaged else nm.model()
    plain = model(nm.data())
    assert nm.replaced_layers(modify(model, MODIFIERS)) == 3
    assert_close(model(nm.data())["forces"], plain["forces"])


def test_modifier_takes_the_options_of_patch() -> None:
    model = modify(nm.model(), [{"modifier": "enable_eqaccel", "verify": False, "deterministic": False}])
    assert not model.model.func.layer0_convnet.conv.tp_scatter.eqaccel.deterministic
    again = modify(model, MODIFIERS)  # as around a model from a checkpoint of training with the modifier
    assert again is model
    assert nm.replaced_layers(model) == 3
    assert model.model.func.layer0_convnet.conv.tp_scatter.eqaccel.deterministic


def test_modifier_in_a_training_module() -> None:
    builder = {"_target_": "nequip_models.model", "num_layers": 2}
    config = {"_target_": "nequip.model.modify", "modifiers": MODIFIERS, "model": builder}
    assert nm.replaced_layers(NequIPLightningModule(config, {"train": 1, "val": 0, "test": 0})) == 2
    plain = NequIPLightningModule(builder, {"train": 1, "val": 0, "test": 0})
    paths = [row.path for row in report(patch(plain)).rows if row.accelerated]
    assert paths[0] == "model.sole_model.model.func.layer0_convnet.conv.tp_scatter"


def test_modifier_is_no_part_of_what_is_packaged() -> None:
    with only_apply_persistent_modifiers(persistent_only=True):
        assert report(modify(nm.model(), MODIFIERS)).accelerated == 0


def test_modifier_is_offered_where_it_can_work() -> None:
    assert "enable_eqaccel" in get_all_modifiers(nm.model())
    assert "enable_eqaccel" not in get_all_modifiers(torch.nn.Linear(2, 2))


def test_patched_models_can_be_packaged(tmp_path: Path) -> None:
    fast = patch(nm.model(), verify=False)
    loaded = nm.packaged(fast, tmp_path / "model.nequip.zip")
    assert nm.replaced_layers(loaded) == 3
    assert torch.equal(loaded(nm.data())["forces"], fast(nm.data())["forces"])


def test_another_nequip_costs_a_warning() -> None:
    with pytest.warns(UserWarning, match="eqaccel.patch"):
        nequip_extension.offer_modifier(types.SimpleNamespace())


def run(command: str, *arguments: object) -> None:
    """Runs one of NequIP's commands as a user does."""
    script = Path(sys.executable).with_name(command)
    done = subprocess.run([script, *map(str, arguments)], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def train(folder: Path, *options: str) -> Path:
    """Runs nequip-train and returns the checkpoint."""
    run("nequip-train", "-cp", TRAINING.parent, "-cn", TRAINING.stem, f"hydra.run.dir={folder}", *options)
    return folder / "last.ckpt"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("accelerated"))


@pytest.fixture(scope="module")
def package(checkpoint: Path) -> Path:
    path = checkpoint.with_name("copper.nequip.zip")
    run("nequip-package", "build", checkpoint, path)
    return path


def calculator(path: Path) -> NequIPCalculator:
    return NequIPCalculator._from_saved_model(path, device="cpu", chemical_species_to_atom_type_map=True)


def crystal(cells: int) -> Atoms:
    atoms = bulk("Cu", cubic=True).repeat(cells)
    atoms.rattle(0.1, seed=cells)
    return atoms


@pytest.mark.slow
def test_training_ends_where_it_does_without(checkpoint: Path, tmp_path: Path) -> None:
    plain = train(tmp_path, "training_module.model.modifiers=[]")
    states = [torch.load(path, map_location="cpu", weights_only=False)["state_dict"] for path in (checkpoint, plain)]
    assert list(states[0]) == list(states[1])
    for name, value in states[1].items():
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel():
            assert float((states[0][name] - value).abs().max()) <= RELATIVE * float(value.abs().max()), name


@pytest.mark.slow
def test_fine_tuning_of_a_checkpoint_of_the_modifier(checkpoint: Path, tmp_path: Path) -> None:
    """Its model is patched when the modifier comes to it."""
    start = f"{{_target_: nequip.model.ModelFromCheckpoint, checkpoint_path: {checkpoint}}}"
    tuned = train(tmp_path, "~training_module.model.model", f"+training_module.model.model={start}")
    states = [torch.load(path, map_location="cpu", weights_only=False)["state_dict"] for path in (checkpoint, tuned)]
    assert list(states[0]) == list(states[1])


@pytest.mark.slow
def test_models_from_checkpoints_and_packages(checkpoint: Path, package: Path) -> None:
    for path in (checkpoint, package):
        model = load_saved_model(path)
        assert report(model).accelerated == 0
        original = calculator(path)
        forces = original.get_forces(crystal(2))
        patch(original)
        original.reset()
        assert abs(original.get_forces(crystal(2)) - forces).max() <= RELATIVE * abs(forces).max()


@pytest.mark.slow
def test_nequip_compile(package: Path, tmp_path: Path) -> None:
    path = tmp_path / "copper.nequip.pt2"
    (line,) = (code for code in inline_codes("docs/nequip.md") if code.startswith("nequip-compile"))
    run(*line.replace("...", f"{package} {path} --mode aotinductor --device cpu --target ase").split())
    with zipfile.ZipFile(path) as archive:
        assert archive.read("nequip_custom_ops_libs.txt") == b"eqaccel.ops"
        wrapper = next(name for name in archive.namelist() if name.endswith(".wrapper.json"))
        assert b"eqaccel::tensor_product_backward" in archive.read(wrapper)
    compiled = NequIPCalculator.from_compiled_model(path, device="cpu", chemical_species_to_atom_type_map=True)
    original = calculator(package)
    for cells in (1, 2, 3):  # numbers of atoms and edges other than those that it was compiled with
        forces = original.get_forces(crystal(cells))
        assert abs(compiled.get_forces(crystal(cells)) - forces).max() <= RELATIVE * abs(forces).max()

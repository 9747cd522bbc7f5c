"""MACE's own training program, as it is and on a patched model: the same weights, and files that hold no patch."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import mace  # noqa: F401  # before e3nn
import pytest
import torch
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.io import write
from mace.cli import run_train
from patch_checks import RELATIVE
from training_recordings import ComputedAgain

from eqaccel.__main__ import main
from eqaccel.errors import PatchError
from eqaccel.integrations import mace_training
from eqaccel.patches.torch_state import default_dtype
from eqaccel.training import recorder

OPTIONS = shlex.split("""
--name=copper --seed=1 --device=cpu --default_dtype=float64 --E0s=average --valid_fraction=0.34 --batch_size=2
--model=ScaleShiftMACE --hidden_irreps=4x0e --max_ell=1 --correlation=1 --r_max=3.0 --num_radial_basis=4
--radial_MLP=[8] --MLP_irreps=8x0e --energy_key=REF_energy --forces_key=REF_forces --compute_forces=True
--num_workers=0 --ema --ema_decay=0.9 --lr=0.01 --restart_latest
""")
AFTER_STEPS = 100 * RELATIVE
"""Of weights after a few steps in float64: Adam divides gradients by their size, which magnifies rounding."""

Program = Callable[[list[str]], None]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six crystals of four atoms with the energies and forces of a simple potential."""
    path = tmp_path_factory.mktemp("data") / "train.xyz"
    frames = []
    for seed in range(6):
        atoms = bulk("Cu", cubic=True)
        atoms.rattle(0.1, seed=seed)
        atoms.calc = EMT()
        atoms.info["REF_energy"] = atoms.get_potential_energy()
        atoms.arrays["REF_forces"] = atoms.get_forces()
        atoms.calc = None
        frames.append(atoms)
    write(path, frames)
    return path


def plain(arguments: list[str]) -> None:
    with pytest.MonkeyPatch.context() as context:
        context.setattr(sys, "argv", ["mace_run_train", *arguments])
        run_train.main()


def patched(arguments: list[str]) -> None:
    assert main(["mace_run_train", *arguments]) == 0


def captured(arguments: list[str]) -> None:
    assert main(["mace_run_train", mace_training.CAPTURE, *arguments]) == 0


def train(program: Program, data: Path, folder: Path, epochs: int) -> dict[str, torch.Tensor]:
    """Trains on, from the checkpoints in a folder if it has any, and gives the weights of the file that is written."""
    with default_dtype(torch.get_default_dtype()):  # MACE's program sets it
        program([*OPTIONS, f"--train_file={data}", f"--work_dir={folder}", f"--max_num_epochs={epochs}"])
    with zipfile.ZipFile(folder / "copper.model") as file:
        pickled = next(name for name in file.namelist() if name.endswith("data.pkl"))
        assert b"eqaccel" not in file.read(pickled)
    return torch.load(folder / "copper.model", weights_only=False).state_dict()


def assert_equal_weights(weights: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert list(weights) == list(wanted)
    for name, value in wanted.items():
        difference = float((weights[name].double() - value.double()).norm())
        assert difference <= AFTER_STEPS * float(value.double().norm()), name


def test_training_goes_on_with_and_without_a_patch(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One epoch each, and another one from the checkpoints: of the same program, and of the other one."""
    programs: dict[str, Program] = {"plain": plain, "patched": patched}
    first = {name: train(program, data, tmp_path / name, 1) for name, program in programs.items()}
    assert_equal_weights(first["patched"], first["plain"])
    second = {}
    for begun, continued in (("plain", "plain"), ("plain", "patched"), ("patched", "plain")):
        folder = tmp_path / f"{begun} {continued}"
        shutil.copytree(tmp_path / begun, folder)
        caplog.clear()
        second[begun, continued] = train(programs[continued], data, folder, 2)
        assert ("modules run on kernels of eqaccel" in caplog.text) == (continued == "patched")
    for weights in second.values():
        assert_equal_weights(weights, second["plain", "plain"])
    name = "products.0.linear.weight"
    assert not torch.equal(first["plain"][name], second["plain", "plain"][name])


def test_steps_may_be_recorded(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are the same, and the log says what was recorded."""
    monkeypatch.setattr(recorder, "Recording", ComputedAgain)
    monkeypatch.setattr(recorder.Recorder, "devices", ("cpu",))
    weights = train(captured, data, tmp_path / "captured", 3)
    assert re.search(r"recorded steps of training: [1-9]\d* calls replayed, 1 recordings made", caplog.text)
    assert_equal_weights(weights, train(patched, data, tmp_path / "patched", 3))


def test_another_version_of_mace_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(run_train, "deepcopy")
    assert main(["mace_run_train", *OPTIONS]) == 1
    assert "mace_run_train: expected deepcopy in mace.cli.run_train" in capsys.readouterr().err


def test_what_cannot_be_patched_is_not_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """MACE's program is as it was afterwards."""
    parameters = run_train.get_params_options
    with mace_training.patched(run_train), pytest.raises(PatchError, match="expected a model of a known kind"):
        run_train.get_params_options(None, torch.nn.Linear(1, 1))
    assert run_train.get_params_options is parameters

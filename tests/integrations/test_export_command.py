"""The commands that export a model and say where the libraries for other programs are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("mace", reason="needs mace-torch")

import mace_models as mm

import eqaccel
from eqaccel.__main__ import main
from eqaccel.ops import library_path
from eqaccel.runtime import include_path

pytestmark = pytest.mark.filterwarnings("ignore")


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "plain.model", tmp_path / "model.pt"
    torch.save(mm.energy_model(**mm.TINY), source)
    assert main(["export", str(source), str(target), "--dtype", "float32"]) == 0
    assert json.loads(capsys.readouterr().out) == eqaccel.load_exported(target).metadata
    content = source.read_bytes()
    assert main(["export", str(source), str(tmp_path / ".." / tmp_path.name / source.name)]) == 1
    assert "path: expected another file than that of the model" in capsys.readouterr().err
    assert source.read_bytes() == content
    torch.save({}, tmp_path / "state.pt")
    (tmp_path / "empty.model").touch()
    (tmp_path / "half.model").write_bytes(source.read_bytes()[: source.stat().st_size // 2])
    (tmp_path / "text.model").write_text("not a model")
    for name, message in {
        "model.pt": "a TorchScript model; give the file that it was made from",
        "no": "No such file",
        ".": "No such file",
        "state.pt": "holds a dict; save the model itself",
        "empty.model": "is empty; copy or save it again",
        "half.model": "it is incomplete: copy it again",
        "text.model": "does not open",
    }.items():
        assert main(["export", str(tmp_path / name), str(tmp_path / "other.pt")]) == 1
        assert message in capsys.readouterr().err


def test_libraries(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["libs"]) == 0
    assert str(library_path()) in capsys.readouterr().out
    assert main(["libs", "--ld-preload"]) == 0
    assert capsys.readouterr().out == f"LD_PRELOAD={library_path()}\n"
    assert main(["libs", "--link"]) == 0
    assert f"-I{include_path()} " in capsys.readouterr().out
    assert (include_path() / "eqaccel/exchange.h").is_file()

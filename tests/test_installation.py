"""The source folder of the package hands over to the installed package, or says how to install one."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from folders import ROOT

import eqaccel
from eqaccel import _runtime, runtime

INSTALLED = Path(eqaccel.__file__).resolve().parent


def python(*arguments: str, folder: Path = ROOT, path: tuple[Path, ...] = (), site: bool = True) -> str:
    """Runs Python in a folder, which it finds modules in; returns what it printed, errors included.

    Args:
        arguments: Of the interpreter.
        folder: Where it starts.
        path: What is on PYTHONPATH.
        site: Whether it sees installed packages.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONSAFEPATH": ""}
    command = [sys.executable, *([] if site else ["-S"]), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_the_installed_package_is_used_in_the_repository() -> None:
    code = """
import eqaccel, eqaccel.patches, eqaccel.integrations.export, sys, pathlib
assert eqaccel is sys.modules["eqaccel"]
assert eqaccel.TensorProductSpec.channelwise("4x0e", "0e", "4x0e").weight_numel == 4
print({str(pathlib.Path(m.__file__).resolve()) for n, m in sys.modules.items() if n.split(".")[0] == "eqaccel"})
"""
    files = eval(python("-c", code, path=(INSTALLED.parent,)))
    assert len(files) > 20
    assert not [file for file in files if not Path(file).is_relative_to(INSTALLED)]


def test_commands_and_pytest_run_in_the_repository() -> None:
    assert "Kernel cache" in python("-m", "eqaccel", "doctor", path=(INSTALLED.parent,))
    collect = ("-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/test_irreps.py")
    assert "tests collected" in python(*collect, path=(INSTALLED.parent,))


def test_the_source_says_how_to_install() -> None:
    text = python("-c", "import eqaccel", site=False)
    assert "ImportError" in text
    assert "does not run by itself" in text
    assert "pip install --no-build-isolation ." in text


def test_two_source_folders_do_not_hand_over_to_each_other(tmp_path: Path) -> None:
    copies = (tmp_path / "one", tmp_path / "two")
    for copy in copies:
        (copy / "eqaccel").mkdir(parents=True)
        (copy / "eqaccel" / "__init__.py").write_bytes((ROOT / "eqaccel" / "__init__.py").read_bytes())
    text = python("-c", "import eqaccel", folder=tmp_path, path=copies, site=False)
    assert "ImportError" in text
    assert str(copies[0] / "eqaccel") in text


def test_an_editable_install_runs_from_the_source() -> None:
    """Its import hook finds what was compiled, and the modules that lie in other folders of the repository."""
    code = f"""
import importlib.util, sys

class Hook:
    def find_spec(name, path=None, target=None):
        if name == "eqaccel._runtime":
            return importlib.util.spec_from_file_location(name, {_runtime.__file__!r})

sys.meta_path.insert(0, Hook)
import eqaccel.irreps
print(eqaccel.irreps.__file__)
"""
    assert python("-c", code).strip() == str(ROOT / "eqaccel" / "irreps.py")


def test_libraries_are_those_of_the_torch_that_is_there() -> None:
    torch = ".".join(version("torch").split(".")[:2])
    assert runtime.torch_libraries() == INSTALLED / f"torch-{torch}"
    assert runtime.torch_libraries(f"{torch}.7a0+git") == runtime.torch_libraries()
    for name in ("libeqaccel_ops.so", "libeqaccel_model.so"):
        assert (runtime.torch_libraries() / name).is_file()


def test_a_torch_without_libraries_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for folder in ("torch-2.9", "torch-2.10"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(eqaccel, "__path__", [str(tmp_path)])
    with pytest.raises(ImportError, match=r"operators for torch 2\.9, 2\.10, and torch 2\.99\.1\+cpu is installed"):
        runtime.torch_libraries("2.99.1+cpu")
    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(ImportError, match="torch is not installed: pip install torch"):
        runtime.torch_libraries()


def absent(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)


def test_the_compiled_module_has_the_types_that_are_written_down() -> None:
    stub = ast.parse((INSTALLED / "_runtime.pyi").read_text())
    named = {node.name: node for node in stub.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert set(named) == {name for name in dir(_runtime) if not name.startswith("_")}
    methods = {node.name for node in named["Program"].body} - {"__init__"}
    assert methods == {name for name in dir(_runtime.Program) if not name.startswith("_")}
    assert (INSTALLED / "py.typed").is_file()


def test_the_version_stands_in_one_place() -> None:
    (line,) = (line for line in (ROOT / "pyproject.toml").read_text().splitlines() if line.startswith("version = "))
    assert line == f'version = "{eqaccel.__version__}"'

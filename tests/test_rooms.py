"""Imports go from left to right along the rooms only, and nothing but numpy is needed before the ops room."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from folders import ROOT, TESTS

from eqaccel.targets import Target

ROOMS = [
    "errors",
    "settings",
    "irreps",
    "roots",
    "wigner",
    "targets",
    "codegen",
    "families",
    "runtime",
    "ops",
    "testing",
    "o3",
    "prepare",
    "step",
    "patches",
    "training",
    "integrations",
    "command",
]
FOLDERS = {"patches": ROOT / "patches", "integrations": ROOT / "integrations"}
FOREIGN = {"e3nn", "mace", "nequip", "sevenn"}
EXTENSIONS = {"nequip_extension.py": "nequip", "mace_training.py": "mace"}
"""Files that serve a program of a foreign package, and which may import it."""


def _imports(file: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return names


def _files(room: str) -> list[Path]:
    folder = FOLDERS.get(room, ROOT / "eqaccel" / room)
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


@pytest.mark.parametrize("room", ROOMS)
def test_imports_go_left_to_right(room: str) -> None:
    # Errors and settings are common ground: every room may read them.
    allowed = set(ROOMS[: ROOMS.index(room) + 1]) | {"errors", "settings", "_runtime"}
    for file in _files(room):
        for name in _imports(file):
            parts = name.split(".")
            if parts[0] == "eqaccel" and len(parts) > 1 and parts[1] in ROOMS:
                assert parts[1] in allowed, f"{file.relative_to(ROOT)} imports {name}"
            if parts[0] == "torch":
                assert ROOMS.index(room) >= ROOMS.index("ops"), f"{file.relative_to(ROOT)} imports torch"
            foreign = FOREIGN - {EXTENSIONS.get(file.name)}
            assert parts[0] not in foreign, f"{file.relative_to(ROOT)} imports {name}"


def test_ase_is_imported_where_its_calculator_is() -> None:
    """Elsewhere it is imported when there is something of it, so that the library works without."""
    for room in ROOMS:
        for file in _files(room):
            names = {node.module for node in ast.parse(file.read_text()).body if isinstance(node, ast.ImportFrom)}
            uses_ase = any(name and name.split(".")[0] == "ase" for name in names)
            assert not uses_ase or file.parent == FOLDERS["integrations"] / "ase", file


def test_families_do_not_know_each_other() -> None:
    folders = [path for path in (ROOT / "eqaccel/families").iterdir() if (path / "__init__.py").exists()]
    for folder in folders:
        others = {f"eqaccel.families.{other.name}" for other in folders if other != folder}
        for file in folder.rglob("*.py"):
            for name in _imports(file):
                assert ".".join(name.split(".")[:3]) not in others, f"{file.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize(
    "room", ["codegen", "families", "runtime", "ops", "o3", "prepare", "step", "patches", "integrations", "command"]
)
def test_every_room_says_what_it_is_for(room: str) -> None:
    folder = FOLDERS.get(room, ROOT / "eqaccel" / room)
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    assert text
    assert "must not" in text.lower(), f"{room}/__init__.py says what it takes and gives, and what it must not know"


def test_a_kind_of_model_is_one_folder() -> None:
    """The table of kinds imports their folders, and nothing else does; a kind does not import another one."""
    patches = FOLDERS["patches"]
    kinds = {file.parent.name for file in patches.glob("*/kind.py")}
    assert kinds == {"e3nn", "mace", "nequip", "sevennet"}
    for file in (*_files("patches"), *_files("integrations")):
        own = {file.parent.name} if file.parent.parent == patches else set()
        foreign = set() if file == patches / "finder.py" else kinds - own
        for name in _imports(file):
            parts = name.split(".")
            if parts[:2] == ["eqaccel", "patches"]:
                assert not foreign & set(parts[2:3]), f"{file.relative_to(ROOT)} imports {name}"


def test_what_names_and_what_takes_the_kernel_of_one_architecture_alone_know_it() -> None:
    folders = [ROOT / name for name in ("csrc", "eqaccel", "patches", "integrations")]
    files = [file for folder in folders for suffix in ("py", "h", "cpp") for file in folder.rglob(f"*.{suffix}")]
    lines = [(file.name, re.split("//|#", line)[0]) for file in files for line in file.read_text().splitlines()]
    assert {name for name, code in lines if "sm_90a" in code} == {"payload.py", "matrix_product.cpp"}


def test_no_test_imports_another() -> None:
    """What tests share stands in tests/support."""
    for file in TESTS.rglob("*.py"):
        others = [name for name in _imports(file) if name.split(".")[0].startswith("test_") or name == "conftest"]
        assert not others, f"{file.relative_to(ROOT)} imports {others}"


def test_folders_of_tests_are_rooms() -> None:
    """Rooms that are one file have their tests beside these folders."""
    folders = {path.parent.relative_to(TESTS).parts[0] for path in TESTS.glob("*/**/test_*.py")}
    assert folders == {room for room in ROOMS if len(_files(room)) > 1} | {"examples"}


def test_types_are_checked_in_every_file_alike() -> None:
    settings = (ROOT / "pyproject.toml").read_text()
    assert "strict = true" in settings
    assert "disable_error_code" not in settings


def test_all_that_targets_say_is_read() -> None:
    files = [file for room in ROOMS if room != "targets" for file in _files(room)]
    text = "".join(file.read_text() for file in [*files, *(ROOT / "examples/benchmarks").glob("*.py")])
    for field in fields(Target):
        assert f".{field.name}" in text, f"nobody asks for {field.name} of a target"


def test_these_rooms_import_numpy_only(tmp_path: Path) -> None:
    code = "import eqaccel.families, eqaccel.settings, sys; print({'torch', 'e3nn', 'mace'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert found.stdout.strip() == "set()"

"""The plugin around `pair_style eqaccel`: found and compiled without asking, or a reason, and never a broken `lmp`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from folders import ROOT, SUPPORT
from lammps_runs import lmp
from lammps_toy import save_toy

from eqaccel.errors import CompileError
from eqaccel.integrations import lammps
from eqaccel.integrations.lammps import SOURCES, build_plugin, find_lammps, plugin_folder

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
WITHOUT_ATOMS = "units metal\nregion b block 0 1 0 1 0 1\ncreate_box 1 b\nmass 1 1.0\n"


def loader_says(folder: Path, script: str, about: str) -> list[str]:
    """What the dynamic loader reports while `lmp` runs a script."""
    (folder / "in.lammps").write_text(script)
    environment = os.environ | {"LD_DEBUG": about, "LD_DEBUG_OUTPUT": str(folder / "loader")}
    command = [str(Path(sys.executable).parent / "lmp"), "-in", "in.lammps"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    return [line for path in folder.glob("loader.*") for line in path.read_text(errors="replace").splitlines()]


def test_lmp_knows_the_style_and_starts_without_torch(tmp_path):
    done = lmp(tmp_path, "info styles pair", starter=True)
    assert "eqaccel" in done.stdout.split("Pair styles:")[1].split()
    lines = loader_says(tmp_path, WITHOUT_ATOMS, "files")
    assert any("eqaccelplugin.so" in line for line in lines)
    assert not any("libtorch" in line for line in lines)


def test_ranks_that_start_together_compile_once(tmp_path):
    environment = os.environ | {"EQACCEL_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "eqaccel.integrations.lammps"]
    started = [subprocess.Popen(command, env=environment, stdout=-1, stderr=-1, text=True, cwd=tmp_path) for _ in "123"]
    outputs = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0, 0, 0]
    assert sum("compiling the LAMMPS plugin" in errors for _, errors in outputs) == 1
    assert len({folder for folder, _ in outputs}) == 1
    assert [path.name for path in (tmp_path / "cache/lammps").rglob("*.so")] == ["eqaccelplugin.so"]


def test_without_a_compiler_the_reason_is_printed_and_lmp_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("EQACCEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("EQACCEL_CXX", "/nowhere/g++")
    assert list(Path(plugin_folder()).glob("*plugin.so")) == []
    assert "no pair_style eqaccel: EQACCEL_CXX names '/nowhere/g++'" in capsys.readouterr().err
    done = lmp(tmp_path, f"{WITHOUT_ATOMS}pair_style zero 1.0\npair_coeff * *\nrun 0", starter=True)
    assert done.returncode == 0, done.stdout
    assert "EQACCEL_CXX" in done.stderr


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(lammps.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CompileError, match=r"LAMMPS is not installed: pip install lammps mpich"):
        build_plugin()
    monkeypatch.undo()
    found = find_lammps()
    assert found.version >= 20250722
    assert (found.mpi_include / "mpi.h").is_file()
    monkeypatch.setenv("EQACCEL_CACHE_DIR", "/proc/none")
    with pytest.raises(CompileError, match="Set EQACCEL_CACHE_DIR"):
        build_plugin(found)


def test_a_torch_that_does_not_load(tmp_path, monkeypatch):
    broken = tmp_path / "libeqaccel_model.so"
    broken.write_text("not a library")
    monkeypatch.setattr(lammps, "model_library", lambda: broken)
    script = f"plugin unload pair eqaccel\nplugin load {build_plugin()}\n{WITHOUT_ATOMS}pair_style eqaccel\n"
    done = lmp(tmp_path, script, starter=True)
    assert done.returncode != 0
    assert "ERROR: pair_style eqaccel: can not load eqaccel" in done.stdout


def test_torch_keeps_its_own_blas(tmp_path):
    """liblammps exports a plain dgemm, which the loader would otherwise give to torch."""
    save_toy(tmp_path / "toy.pt")
    script = f"{WITHOUT_ATOMS}create_atoms 1 single 0.5 0.5 0.5\npair_style eqaccel\npair_coeff * * toy.pt H\nrun 0\n"
    lines = [line.split(" to ") for line in loader_says(tmp_path, script, "bindings") if "`dgemm_'" in line]
    lines = [to for binding, to in lines if "libtorch_cpu.so" in binding]
    assert lines
    assert all("libtorch_cpu.so" in line for line in lines), lines


@pytest.mark.slow
def test_recipe_for_a_lammps_of_ones_own(tmp_path):
    found = find_lammps()
    command = ["cmake", "-G", "Ninja", "-S", str(SOURCES), "-B", str(tmp_path / "build")]
    command += [f"-DPython_EXECUTABLE={sys.executable}", f"-DLAMMPS_SOURCE_DIR={found.include}"]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def run(*arguments):
        return subprocess.run(arguments, env=environment, capture_output=True, text=True)

    refused = run(*command)
    assert refused.returncode != 0
    assert "no version.h" in refused.stderr
    done = run(*command, f"-DLAMMPS_VERSION={found.version}")
    assert done.returncode == 0, done.stdout + done.stderr
    done = run("cmake", "--build", str(tmp_path / "build"))
    assert done.returncode == 0, done.stdout + done.stderr
    save_toy(tmp_path / "toy.pt")
    load = f"plugin unload pair eqaccel\nplugin load {tmp_path}/build/eqaccelplugin.so\n"
    run_it = "create_atoms 1 single 0.5 0.5 0.5\npair_style eqaccel\npair_coeff * * toy.pt H\nrun 0\n"
    done = lmp(tmp_path, load + WITHOUT_ATOMS + run_it, starter=True)
    assert done.returncode == 0, done.stdout

    headers = tmp_path / "src"
    shutil.copytree(found.include, headers)
    (headers / "version.h").write_text('#define LAMMPS_VERSION "2 Aug 2023"\n#define LAMMPS_UPDATE "Update 4"\n')
    command[command.index("-B") + 1] = str(tmp_path / "other")
    done = run(*command, f"-DLAMMPS_SOURCE_DIR={headers}")
    assert "for LAMMPS 20230802 (SMALLBIG)" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_exchanges_of_a_gpu_reach_mpi_on_the_main_thread(tmp_path):
    compiler = shutil.which("g++") or shutil.which("c++")
    source = str(SUPPORT / "cpp_host/main_thread_exchange.cpp")
    folders = [f"-I{ROOT / folder}" for folder in ("csrc/model", "csrc/include")]
    command = [compiler, "-std=c++17", "-pthread", *folders, source, "-o", "exchange"]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    ran = subprocess.run(["./exchange"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    step = ["forward 1 main", "reverse 2 main"]
    assert ran.stdout.splitlines() == [
        *[*step, "row 11"],
        *[*step, "row 22"],
        "ghosts 3",
        "alone other",
        "caught refused by the engine",
        "caught failed by itself",
        "forward 1 main",
        "end",
    ]

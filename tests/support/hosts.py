"""Compilers that tests run: of the C++ programs of cpp_host against the installed torch, and of HIP text."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from folders import SUPPORT

from eqaccel import runtime
from eqaccel.codegen import preludes
from eqaccel.runtime import include_path


def compile_cpp(*arguments: str | Path, folder: Path | None = None) -> None:
    """Runs a C++ compiler in a folder, or skips the test if there is none."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    built = subprocess.run([compiler, *map(str, arguments)], cwd=folder, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr


def gpu_kernels(driver: str, folder: Path, body: str, family: Path | None = None, **words: object) -> ctypes.CDLL:
    """Compiles gpu_on_cpu/<driver>, which runs kernels of a GPU on a CPU, or skips the test if there is no compiler.

    Args:
        driver: A file of gpu_on_cpu.
        folder: Where files go; there may be several libraries in it.
        body: The text of "body.h".
        family: The folder of a family, if its kernels have headers of their own.
        words: Macros without their "EQ_".
    """
    host = SUPPORT / "gpu_on_cpu"
    for place in filter(None, (Path(preludes.__file__).parent, family)):
        for file in place.glob("*.h"):
            if not (host / file.name).exists():
                shutil.copy(file, folder)
    (folder / "body.h").write_text(body)
    library = folder / f"{len(list(folder.glob('*.so')))}.so"
    options = ["-std=c++20", "-O1", "-shared", "-fPIC", *(f"-DEQ_{name}={value}" for name, value in words.items())]
    compile_cpp(*options, f"-I{folder}", f"-I{host}", host / driver, "-o", library)
    return ctypes.CDLL(str(library))


def build(source: str, folder: Path, *options: str) -> Path:
    """Compiles cpp_host/<source> in a folder, or skips the test if there is no compiler; returns the program."""
    home = Path(torch.__file__).parent
    libraries = [lib for lib in ("torch", "torch_cpu", "torch_cuda", "c10") if (home / f"lib/lib{lib}.so").exists()]
    # Per-operator headers take compilers two thirds of the time.
    command = ["-std=c++20", "-O0", "-DAT_PER_OPERATOR_HEADERS", *options, SUPPORT / "cpp_host" / source, "-o", "host"]
    command += [f"-I{home}/include", f"-I{home}/include/torch/csrc/api/include", f"-L{home}/lib", f"-I{include_path()}"]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", "-Wl,--no-as-needed"]
    command += [f"-Wl,-rpath,{home}/lib", *(f"-l{lib}" for lib in libraries), "-ldl"]
    compile_cpp(*command, folder=folder)
    return folder / "host"


def run(*command: str | Path, **environment: str) -> list[list[float]]:
    """Runs a program; returns the numbers of each line that it prints, without the word in front of them."""
    ran = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment or None)
    assert ran.returncode == 0, ran.stderr
    return [[float(value) for value in line.split()[1:]] for line in ran.stdout.splitlines()]


needs_nvrtc = pytest.mark.skipif(
    runtime.locate_nvrtc() is None, reason="the nvidia-cuda-nvrtc package is not installed"
)
needs_hipcc = pytest.mark.skipif(shutil.which("hipcc") is None, reason="hipcc is not installed")


def assert_cuda_texts_compile(texts: Iterable[tuple[str, str]], folder: Path, turn: int = 0) -> None:
    """Compiles kernels that are of no use but to see that they compile.

    Compilers of C++ and of PTX share the work. The first one, for which a preprocessor may see a text in another way,
    gets each text for all of its architectures; the second one, which takes most of the time, for one of them, in turn.

    Args:
        texts: Architectures and texts.
        folder: Where files go.
        turn: The number of the architecture that the first text is compiled for to the end.
    """
    architectures: dict[str, list[str]] = {}
    for arch, text in texts:
        architectures.setdefault(text, []).append(arch)
    outputs: list[str] = []
    for number, (text, known) in enumerate(architectures.items()):
        file = folder / f"{number}.cu"
        file.write_text(text)
        last = known[(number + turn) % len(known)]
        outputs += [f"{arch if arch == last else arch.replace('sm_', 'compute_')}:{file}" for arch in known]
    command = [sys.executable, str(SUPPORT / "compile_quickly.py"), str(runtime.locate_nvrtc()), *outputs]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    for arch, name in (output.split(":", 1) for output in outputs):
        content = Path(f"{name}.{arch}").read_bytes()
        assert content.startswith(b"\x7fELF") if arch.startswith("sm_") else b".visible .entry" in content


def assemble_hip(text: str, folder: Path) -> None:
    """Compiles a kernel for gfx90a as far as the compiler alone goes: linking takes AMD's device libraries."""
    file = folder / "kernel.hip"
    file.write_text(text)
    options = ["--offload-arch=gfx90a", "-std=c++17", "--cuda-device-only", "-S", "-nogpulib"]
    command = ["hipcc", *options, str(file), "-o", str(folder / "kernel.s")]
    environment = os.environ | {"HIP_PLATFORM": "amd"}  # hipcc would pass the file to nvcc where there is one
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr

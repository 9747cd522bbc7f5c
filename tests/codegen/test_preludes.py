"""Preludes: each is a header of its own, payloads carry them in one piece, and compilers name their files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from folders import ROOT
from hosts import assemble_hip, compile_cpp, needs_hipcc, needs_nvrtc

from eqaccel import families, runtime
from eqaccel.codegen import preludes
from eqaccel.codegen.preludes import flatten_prelude
from eqaccel.errors import CompileError
from eqaccel.families.tensor_product import TensorProductSpec, payload

FOLDER = Path(preludes.__file__).parent
FILES = sorted([*FOLDER.glob("*.h"), *Path(families.__file__).parent.glob("*/*.h")])
CPU = [file for file in FILES if file.name.startswith("cpu") or file.name in ("abi.h", "direction.h", "weights.h")]
TENSOR_CORES = (
    "tensor_core.h",
    "halves.h",
    "gpu_radial_network.h",
    "factors.h",
    "mma_product.h",
    "wgmma_product.h",
    "matrix_product.h",
)
GPU = [file for file in FILES if file.name.startswith("gpu") or file.name in (*TENSOR_CORES, "neighbors.h")]
HIP = [file for file in GPU if file.name not in TENSOR_CORES]
SPEC = TensorProductSpec.channelwise("4x0e+4x1o", "0e+1o", "0e+1o")
HEAD = "#define EQ_DIRECTION 2\n#define EQ_SCALAR float\n"


def package(file: Path) -> str:
    """The family that a prelude belongs to; of those of all families, their own package."""
    return preludes.__name__ if file.parent == FOLDER else f"{families.__name__}.{file.parent.name}"


@pytest.mark.parametrize("file", CPU, ids=lambda file: file.name)
def test_a_tool_reads_each_cpu_prelude_as_it_is(file: Path) -> None:
    options = ["-std=c++17", "-fopenmp", "-fsyntax-only", "-DEQ_DIRECTION=2", "-DEQ_SCALAR=float", f"-I{FOLDER}"]
    compile_cpp(*options, "-include", file, "-xc++", "/dev/null")


@needs_nvrtc
@pytest.mark.parametrize("file", GPU, ids=lambda file: file.name)
def test_each_gpu_prelude_includes_what_it_uses(file: Path) -> None:
    runtime.compile_cuda(HEAD + flatten_prelude(file.name, "cuda", package(file)), "sm_90a")


@needs_hipcc
@pytest.mark.parametrize("file", HIP, ids=lambda file: file.name)
def test_each_gpu_prelude_includes_what_it_uses_on_hip(file: Path, tmp_path: Path) -> None:
    assemble_hip(HEAD + flatten_prelude(file.name, "hip", package(file)), tmp_path)


def test_file_names_are_unique() -> None:
    """Messages of compilers tell a file by its name."""
    assert len({file.name for file in FILES}) == len(FILES)


@pytest.mark.parametrize(("name", "backend"), [("cpu.h", "cpu"), ("gpu.h", "cuda"), ("gpu.h", "hip")])
def test_every_line_follows_the_marker_of_its_file(name: str, backend: str) -> None:
    text = flatten_prelude(name, backend)
    assert '#include "' not in text
    assert "#pragma once" not in text
    starts = re.findall(r'^#line 1 "(.+)"$', text, re.MULTILINE)
    assert len(starts) == len(set(starts))
    assert {"abi.h", "direction.h", name} < set(starts)
    assert starts[-1] == "body.cpp"
    assert ("cuda.h" in starts, "hip.h" in starts) == (backend == "cuda", backend == "hip")
    file, number = "", 0
    for line in text.splitlines():
        if marker := re.fullmatch(r'#line (\d+) "(.+)"', line):
            number, file = int(marker[1]), marker[2]
        elif line:
            assert (FOLDER / file).read_text().splitlines()[number - 1] == line
            number += 1
        else:
            number += 1


def test_numbers_of_the_machine_say_where_they_come_from() -> None:
    """Sizes of blocks, chunks and parts, which were measured or follow from something: a comment says from what."""
    files = [*FOLDER.glob("cpu*.h"), *FOLDER.glob("gpu_work_split.h"), ROOT / "csrc/runtime/work_split.h"]
    found = 0
    for file in files:
        explained = False
        for line in file.read_text().splitlines():
            number = re.match(r"constexpr (int|int64_t) .*= [\d<< ]+[,;]", line)
            explained = line.startswith("//") or (explained and line.startswith("constexpr")) or "//" in line
            assert explained or not number, f"{file.name}: {line}"
            found += bool(number)
    assert found >= 10


def with_fault(backend: str, arch: str | None = None) -> tuple[str, int]:
    """A source whose body has an undeclared name, and the line of the body that has it."""
    text = runtime.Program(payload(SPEC)[0]).source(backend, "float32", "forward", arch)
    before, marker, body = text.partition('#line 1 "body.cpp"\n')
    lines = body.splitlines()
    line = next(number for number, line in enumerate(lines, 1) if "const Lane wv = " in line)
    lines[line - 1] += " undeclared_name;"
    return before + marker + "\n".join(lines) + "\n", line


def test_messages_of_the_host_compiler_name_files() -> None:
    text, line = with_fault("cpu")
    with pytest.raises(CompileError) as error:
        runtime.compile_cpu(text, "cpu-generic")
    assert f"body.cpp:{line}:" in error.value.log
    text = text.replace("struct Topology {\n", "struct Topology {\n  undeclared_name here;\n")
    line = (FOLDER / "cpu.h").read_text().splitlines().index("struct Topology {") + 2
    with pytest.raises(CompileError) as error:
        runtime.compile_cpu(text, "cpu-generic")
    assert f"cpu.h:{line}:" in error.value.log


@needs_nvrtc
def test_messages_of_nvrtc_name_files() -> None:
    text, line = with_fault("cuda", "sm_90")
    with pytest.raises(CompileError) as error:
        runtime.compile_cuda(text, "sm_90")
    assert f"body.cpp({line}):" in error.value.log


@needs_hipcc
def test_messages_of_hipcc_name_files(tmp_path: Path) -> None:
    text, line = with_fault("hip", "gfx90a")
    with pytest.raises(AssertionError, match=rf"body\.cpp:{line}:"):
        assemble_hip(text, tmp_path)


def test_lines_of_tables_are_short() -> None:
    spec = TensorProductSpec.channelwise("128x0e+128x1o+128x2e", "0e+1o+2e+3o", "0e+1o+2e+3o")
    text = runtime.Program(payload(spec)[0]).source("cuda", "float32", "backward", "sm_90")
    tables = re.findall(r"static constexpr \w+ values\[\] = \{.*?\}; return", text, re.DOTALL)
    assert any(len(table) > 1000 for table in tables)
    assert max(len(line) for table in tables for line in table.splitlines()) <= 120

"""The runtime: payloads, compilers, and a disk cache that survives damage, races, kills and missing permissions."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from folders import SUPPORT
from hosts import compile_cpp
from runtime_checks import ABI, COMPILE, CUDA_BODY, SCALE_BODY, kept, make_payload, run_python, start_python

from eqaccel import codegen, runtime
from eqaccel.errors import CompileError, MissingCompilerError
from eqaccel.targets import host_target

pytestmark = pytest.mark.usefixtures("cache_folder")


@pytest.mark.parametrize("scalar", ["float32", "float64"])
def test_compile_and_launch(scalar, cache_folder):
    program = runtime.Program(make_payload())
    x = np.arange(100, dtype=scalar)
    z = np.zeros_like(x)
    operands = {"x": x, "z": z, "num_receivers": 100, "threads": 2}
    runtime.launch_cpu(program, scalar, "forward", operands)
    np.testing.assert_array_equal(z, 2 * x)
    assert program.workspace_bytes("cpu", scalar, "forward", operands) == x.nbytes
    assert [path.suffix for path in kept(cache_folder)] == [".so"], "an entry and no temporary files"


def entry(name: str, content: bytes) -> bytes:
    return f"{name} {len(content)}\n".encode() + content + b"\n"


def test_a_binary_in_the_payload_is_taken_without_a_compiler(cache_folder, monkeypatch):
    program = runtime.Program(make_payload())
    source = program.source("cpu", "float32", "forward").replace("2 * x", "3 * x")
    code, log = program.compile_for(host_target().name, "float32", "forward", source)
    assert "-march=native" not in log
    precompiled = make_payload() + entry(f"binary/{host_target().name}/forward/float32", code)
    monkeypatch.setenv("EQACCEL_CXX", "/nonexistent")
    x, z = np.arange(8, dtype=np.float32), np.zeros(8, np.float32)
    operands = {"x": x, "z": z, "num_receivers": 8}
    runtime.launch_cpu(runtime.Program(precompiled), "float32", "forward", operands)
    np.testing.assert_array_equal(z, 3 * x)
    assert not kept(cache_folder), "nothing was compiled"
    for other in (entry("binary/cpu-none/forward/float32", code), entry("binary/sm_90/forward/float32", code)):
        with pytest.raises(MissingCompilerError):
            runtime.launch_cpu(runtime.Program(make_payload() + other), "float32", "forward", operands)


@pytest.mark.parametrize(("precompiled", "arch", "runs"), [("sm_80", "sm_86", True), ("sm_90", "sm_86", False)])
def test_cuda_binaries_run_on_later_revisions(precompiled, arch, runs, monkeypatch):
    program = runtime.Program(make_payload() + entry(f"binary/{precompiled}/forward/float32", b"cubin"))
    monkeypatch.setenv("EQACCEL_NVRTC", "/nonexistent")
    if runs:
        assert program.compile("cuda", "float32", "forward", arch)["key"] == f"precompiled-{precompiled}"
    else:
        compiled = {"key": ""}
        with contextlib.suppress(MissingCompilerError):  # an NVRTC that is loaded already stays in use
            compiled = program.compile("cuda", "float32", "forward", arch)
        assert not compiled["key"].startswith("precompiled")


def test_a_target_of_another_processor():
    with pytest.raises(ValueError, match=r"makes kernels for .*, not for 'cpu-none'"):
        runtime.Program(make_payload()).compile_for("cpu-none", "float32", "forward", "")


def test_a_payload_of_another_version():
    with pytest.raises(ValueError, match=r"kernels of interface .* got interface 99"):
        runtime.Program(make_payload(meta="abi=99\n"))


def test_payload_gives_numbers_and_source():
    program = runtime.Program(make_payload(meta="x_dim=12\ngpu/forward/float32/threads=64\n"))
    assert program.number("x_dim") == 12
    assert program.number("gpu/forward/float32/threads") == 64
    source = program.source("cpu", "float32", "forward")
    assert source.endswith(ABI + SCALE_BODY)
    assert "#define EQ_SCALAR float\n" in source
    with pytest.raises(IndexError, match="no 'y_dim'"):
        program.number("y_dim")
    with pytest.raises(IndexError, match="no entry 'cpu/backward'"):
        program.source("cpu", "float32", "backward")


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"", "EQACCEL-PAYLOAD 1"),
        (b"EQACCEL-PAYLOAD 2\n", "got 'EQACCEL-PAYLOAD 2'"),
        (b"EQACCEL-PAYLOAD 1\n", "expected an entry 'meta'"),
        (b"EQACCEL-PAYLOAD 1\nmeta\n", "'<name> <size>', got 'meta'"),
        (b"EQACCEL-PAYLOAD 1\nmeta ten\n", "a whole number in the size of entry 'meta', got 'ten'"),
        (b"EQACCEL-PAYLOAD 1\nmeta 10\nabc\n", "10 bytes and a newline for entry 'meta', got 4 bytes"),
        (b"EQACCEL-PAYLOAD 1\nmeta 99999999999999999999\nabc\n", "a whole number"),
        (b"EQACCEL-PAYLOAD 1\nmeta 2\nabc\n", "a newline after entry 'meta'"),
        (b"EQACCEL-PAYLOAD 1\nmeta 3\nabc\n", "'key=value'"),
        (b"EQACCEL-PAYLOAD 1\nmeta 3\na=b\n", "a whole number in meta 'a', got 'b'"),
        (make_payload()[:-1], "bytes and a newline"),
    ],
)
def test_payload_errors_name_what_came(payload, message):
    with pytest.raises(ValueError, match=message):
        runtime.Program(payload)


def test_register_program_keeps_the_first():
    content = make_payload(meta="x_dim=20240317\n")
    key = codegen.payload_key(content)
    assert runtime.find_program(key) is None
    program = runtime.register_program(key, content)
    assert runtime.find_program(key) is program
    assert runtime.register_program(key, make_payload(meta="x_dim=2\n")) is program


def test_a_key_belongs_to_its_payload():
    content = make_payload(meta="x_dim=20240318\n")
    with pytest.raises(ValueError, match="damaged, or changed without a new key"):
        runtime.register_program(codegen.payload_key(content) ^ 1, content)


def test_second_process_hits_the_cache():
    first, second = run_python(COMPILE).split(), run_python(COMPILE).split()
    assert (first[0], second[0]) == ("False", "True")
    assert float(second[1]) < max(0.05, 0.5 * float(first[1]))


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty"])
def test_damaged_entry_is_rebuilt(cache_folder, damage):
    program = runtime.Program(make_payload())
    program.compile("cpu", "float32", "forward")
    (entry,) = kept(cache_folder)
    good = entry.read_bytes()
    bad = bytearray(good)
    bad[len(bad) // 2] ^= 1
    entry.write_bytes({"truncated": good[:-100], "flipped": bytes(bad), "empty": b""}[damage])
    before = runtime.cache_stats()
    assert not program.compile("cpu", "float32", "forward")["cached"]
    assert runtime.cache_stats()["misses"] == before["misses"] + 1
    assert program.compile("cpu", "float32", "forward")["cached"]


def test_unwritable_folder_warns_once_and_works(tmp_path):
    (tmp_path / "file").write_text("")  # a folder under a file can not be made, not even by root
    output = run_python(
        """
        import warnings, numpy as np
        warnings.simplefilter("always")
        for scalar in ("float32", "float64"):
            x, z = np.ones(3, scalar), np.zeros(3, scalar)
            program = runtime.Program(common.make_payload())
            runtime.launch_cpu(program, scalar, "forward", {"x": x, "z": z, "num_receivers": 3})
            assert (z == 2).all()
            assert program.compile("cpu", scalar, "forward")["path"] == ""
        """,
        EQACCEL_CACHE_DIR=str(tmp_path / "file" / "cache"),
    )
    assert output.count("CacheWarning") == 1
    assert "EQACCEL_CACHE_DIR" in output


def test_compile_error_carries_the_log(tmp_path, monkeypatch):
    monkeypatch.setenv("EQACCEL_DUMP", str(tmp_path / "dump"))
    program = runtime.Program(make_payload(cpu="int broken() { return undeclared_name; }"))
    with pytest.raises(CompileError, match=r"host compiler failed.*error: .*undeclared_name.*EQACCEL_DUMP") as error:
        program.compile("cpu", "float32", "forward")
    assert "undeclared_name" in error.value.log
    assert "-O2" in error.value.log, "the command is part of the log"
    (source,) = (tmp_path / "dump").glob("cpu-forward-float32-*.cpp")
    assert "undeclared_name" in source.read_text()


def test_missing_entry_point_is_an_error():
    program = runtime.Program(make_payload(cpu='extern "C" void other() {}'))
    with pytest.raises(CompileError, match="does not export 'eq_"):
        runtime.launch_cpu(program, "float32", "forward", {})


def test_missing_compiler_says_what_to_do(monkeypatch):
    program = runtime.Program(make_payload())
    monkeypatch.setenv("EQACCEL_CXX", "/nonexistent/c++")
    with pytest.raises(MissingCompilerError, match="EQACCEL_CXX names '/nonexistent/c"):
        program.compile("cpu", "float32", "forward")
    monkeypatch.delenv("EQACCEL_CXX")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MissingCompilerError, match="apt install"):
        runtime.host_compiler()


def test_compiler_variable_may_hold_arguments(monkeypatch):
    monkeypatch.setenv("EQACCEL_CXX", "env g++")
    assert runtime.Program(make_payload()).compile("cpu", "float32", "forward")["cached"] is False


def test_two_processes_compile_the_same_kernel(cache_folder):
    processes = [start_python(COMPILE) for _ in range(2)]
    for process in processes:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
    assert len(kept(cache_folder)) == 1
    assert run_python(COMPILE).startswith("True")


def test_threads_compile_one_kernel_once():
    output = run_python(
        """
        from concurrent.futures import ThreadPoolExecutor
        program = runtime.Program(common.make_payload())
        def work(_):
            return program.workspace_bytes("cpu", "float64", "forward", {"num_receivers": 3})
        with ThreadPoolExecutor(4) as pool:
            print(set(pool.map(work, range(8))), runtime.cache_stats())
        """
    )
    assert output.strip() == "{24} {'hits': 0, 'misses': 1}"


def test_killed_compilation_leaves_no_obstacle(cache_folder, tmp_path):
    slow = tmp_path / "slow"
    slow.write_text('#!/bin/sh\n[ "$1" = --version ] && echo slow 1 && exit\nexec sleep 60\n')
    slow.chmod(0o755)
    process = start_python(COMPILE, EQACCEL_CXX=str(slow))
    deadline = time.time() + 60
    while not (cache_folder.exists() and list(cache_folder.glob(".tmp-*/kernel.cpp"))) and time.time() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    (left,) = cache_folder.glob(".tmp-*")

    assert run_python(COMPILE).startswith("False")
    assert left.exists(), "young leftovers may belong to a living process"
    os.utime(left, (time.time() - 2 * 86400,) * 2)
    runtime.Program(make_payload()).compile("cpu", "float64", "forward")
    assert not left.exists()


def test_dump_writes_source_log_and_resources(tmp_path, monkeypatch):
    monkeypatch.setenv("EQACCEL_DUMP", str(tmp_path / "dump"))
    runtime.Program(make_payload()).compile("cpu", "float64", "forward")
    names = sorted(path.name for path in (tmp_path / "dump").iterdir())
    assert [Path(name).suffix for name in names] == [".cpp", ".log", ".resources"]
    assert all(name.startswith("cpu-forward-float64-") for name in names)


@pytest.mark.parametrize(
    ("operands", "message"),
    [
        ({"x": np.zeros(3, "float64")}, "x: expected dtype float32, got float64"),
        ({"x": np.zeros((4, 4), "float32").T}, "x: expected a contiguous array"),
        ({"edge": np.zeros(3, "int64")}, "edge: expected dtype int32"),
        ({"u": 1}, "got 'u'"),
        ({"x": [1.0]}, "x: expected a NumPy array"),
    ],
)
def test_operand_errors(operands, message):
    with pytest.raises(ValueError, match=message):
        runtime.launch_cpu(runtime.Program(make_payload()), "float32", "forward", operands)


@pytest.mark.parametrize("field", ["backend", "scalar", "direction"])
def test_unknown_choice_is_named(field):
    choice = {"backend": "cpu", "scalar": "float32", "direction": "forward"} | {field: "other"}
    with pytest.raises(ValueError, match=f"{field}: expected one of .*, got 'other'"):
        runtime.Program(make_payload()).source(**choice)


nvrtc = pytest.mark.skipif(runtime.locate_nvrtc() is None, reason="the nvidia-cuda-nvrtc package is not installed")


@nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_nvrtc_compiles_without_a_gpu(arch):
    cubin, log = runtime.compile_cuda(CUDA_BODY, arch)
    assert cubin.startswith(b"\x7fELF")
    used = runtime.resources(log)
    assert set(used) == {"first", "second"}
    assert used["first"]["registers"] > 0
    assert used["first"]["spill_store_bytes"] == 0


@nvrtc
def test_nvrtc_gives_its_log_each_time():
    """Beside a driver it has a cache of its own, without logs."""
    logs = [runtime.resources(runtime.compile_cuda(CUDA_BODY, "sm_90")[1]) for _ in range(3)]
    assert logs[0] == logs[1] == logs[2] != {}


@nvrtc
def test_cuda_program_goes_through_the_cache():
    program = runtime.Program(make_payload())
    first = runtime.compile_program(program, "cuda", "float32", "forward", "sm_90")
    second = runtime.compile_program(program, "cuda", "float32", "forward", "sm_90")
    other = runtime.compile_program(program, "cuda", "float32", "forward", "sm_80")
    assert [first["cached"], second["cached"], other["cached"]] == [False, True, False]
    assert second["resources"] == first["resources"] != {}
    with pytest.raises(ValueError, match="arch: expected"):
        runtime.compile_program(program, "cuda", "float32", "forward")


def test_nvrtc_is_looked_for_in_python_packages(tmp_path, monkeypatch):
    packages = tmp_path / "a[1] * folder"
    for folder, name in (
        ("cuda_nvrtc", "libnvrtc.so.98"),
        ("cu99", "libnvrtc.so.99"),
        ("cu99", "libnvrtc.so.99.1.7"),
        ("cu99", "libnvrtc-builtins.so.100"),
        ("cudnn", "libnvrtc.so.101"),
    ):
        file = packages / "nvidia" / folder / "lib" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    monkeypatch.syspath_prepend(packages)
    assert runtime.locate_nvrtc() == packages / "nvidia/cu99/lib/libnvrtc.so.99"


@pytest.mark.parametrize("has_builtins", [True, False])
def test_nvrtc_finds_what_lies_beside_it(tmp_path, has_builtins):
    library, builtins = tmp_path / "libnvrtc.so.99", "libnvrtc-builtins.so.99.7"
    shared = ["-shared", "-fPIC", "-o"]
    compile_cpp(SUPPORT / "cpp_host/nvrtc.cpp", *shared, library)
    if has_builtins:
        compile_cpp("-xc++", "/dev/null", *shared, tmp_path / builtins, f"-Wl,-soname,{builtins}")
    compiled = run_python(
        "from eqaccel import runtime\n"
        "try: print(runtime.compile_cuda('', 'sm_90')[0])\n"
        "except Exception as error: print(error)",
        EQACCEL_NVRTC=str(library),
    )
    assert ("b'code'" if has_builtins else f"error: no {builtins}") in compiled


@nvrtc
def test_nvrtc_error_carries_the_log():
    with pytest.raises(CompileError, match=r"failed on a kernel for sm_90.*error: .*undeclared_name") as error:
        runtime.compile_cuda("__global__ void k() { undeclared_name; }", "sm_90")
    assert "undeclared_name" in error.value.log


def test_resources_are_read_from_both_compilers():
    amd = "k.hip:1:0: remark: Function Name: scale [-Rpass]\nremark:     VGPRs: 24 [-R]\nremark:  VGPRs Spill: 3 [-R]"
    assert runtime.resources(amd) == {"scale": {"registers": 24, "spill_store_bytes": 3}}
    assert runtime.resources("nothing of use") == {}


def test_resources_of_a_kernel_count_the_functions_that_it_calls():
    log = (
        "ptxas info    : Compiling entry function 'scale' for 'sm_90'\n"
        "ptxas info    : Function properties for scale\n"
        "ptxas         .     208 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads\n"
        "ptxas info    : Used 255 registers, used 1 barriers, 208 bytes cumulative stack size\n"
        "ptxas info    : Function properties for _Z4calledv\n"
        "ptxas         .     16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n"
    )
    used = {"registers": 255, "stack_bytes": 224, "spill_store_bytes": 12, "spill_load_bytes": 16}
    assert runtime.resources(log) == {"scale": used}


def test_device_lists_are_lists():
    assert isinstance(runtime.cuda_devices(), list)
    assert isinstance(runtime.hip_devices(), list)

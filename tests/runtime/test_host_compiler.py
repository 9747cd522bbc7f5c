"""The host compiler as a process: interrupted, hanging, slow, failing; nothing of it is left behind."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from eqaccel import TensorProduct, TensorProductSpec, runtime
from eqaccel.errors import CompileError, SettingsError
from eqaccel.families.tensor_product import payload

SPEC = TensorProductSpec.channelwise("3x0e+3x1o", "0e+1o", "0e+1o")

# Like a compiler, a driver that waits for the program which does the work.
HANGING = """#!/bin/sh
if [ "$1" = --version ]; then echo "hanging 1.0"; exit; fi
sh -c 'echo $$ >> {processes}; exec sleep 600'
exit $?
"""

# Makes the calls that it is told to make, and interrupts itself in another thread when it is told to.
PROGRAM = """
import queue, signal, sys, threading
import torch
signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs of a shell in the background ignore it otherwise
from eqaccel import TensorProduct, TensorProductSpec, runtime, warmup
from eqaccel.families.tensor_product import payload
spec = TensorProductSpec.channelwise("3x0e+3x1o", "0e+1o", "0e+1o")
module = TensorProduct(spec)
calls = {
    "runtime": lambda: runtime.compile_program(runtime.Program(payload(spec)[0]), "cpu", "float32", "forward"),
    "operator": lambda: module(torch.ones(2, spec.x_dim), torch.ones(2, spec.y_dim), torch.ones(2, spec.weight_numel)),
    "warmup": lambda: warmup(module),
}
names = queue.SimpleQueue()
def listen():
    for word in map(str.strip, sys.stdin):
        if word == "interrupt":
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        else:
            names.put(word)
    names.put(None)
threading.Thread(target=listen, daemon=True).start()
for name in iter(names.get, None):
    try:
        calls[name]()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""
CALLS = ("runtime", "operator", "warmup")


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that hangs; the file has the numbers of the processes that it has started."""
    path = tmp_path / "processes"
    compiler = tmp_path / "compiler"
    compiler.write_text(HANGING.format(processes=path))
    compiler.chmod(0o755)
    monkeypatch.setenv("EQACCEL_CXX", str(compiler))
    return path


def _wait_for(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def _runs(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _assert_nothing_left(processes: Path, cache: Path) -> None:
    _wait_for(lambda: not any(map(_runs, processes.read_text().split())), 10)
    assert not list(cache.glob(".tmp-*"))


def _compile() -> dict[str, object]:
    return runtime.compile_program(runtime.Program(payload(SPEC)[0]), "cpu", "float32", "forward")


def _tell(program: subprocess.Popen[str], word: str) -> None:
    print(word, file=program.stdin, flush=True)


INTERRUPTS = {
    "to the process": lambda program: os.kill(program.pid, signal.SIGINT),
    "to its group": lambda program: os.killpg(program.pid, signal.SIGINT),
    "to another thread": lambda program: _tell(program, "interrupt"),
}


def test_interrupt_ends_compilers_at_once(cache_folder: Path, processes: Path, tmp_path: Path) -> None:
    """A notebook interrupts the process alone, a terminal all of its group; the system chooses the thread.

    One process is interrupted again and again.
    """
    command = [sys.executable, "-c", PROGRAM]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, cwd=tmp_path, text=True, start_new_session=True, **pipes) as program:
        watchdog = threading.Timer(300, program.kill)
        watchdog.start()
        try:
            for call, interrupt in itertools.product(CALLS, INTERRUPTS):
                processes.unlink(missing_ok=True)
                _tell(program, call)
                _wait_for(lambda: processes.exists() and processes.read_text().endswith("\n"))
                start = time.monotonic()
                INTERRUPTS[interrupt](program)
                assert program.stdout.readline() == "interrupted\n", (call, interrupt)
                assert time.monotonic() - start < 20, (call, interrupt)
                _assert_nothing_left(processes, cache_folder)
            output, errors = program.communicate()
        finally:
            watchdog.cancel()
            program.kill()
    assert (output, program.returncode) == ("", 0), errors


def test_compiler_that_hangs_is_ended(cache_folder: Path, processes: Path, monkeypatch, caplog) -> None:
    monkeypatch.setenv("EQACCEL_COMPILE_LIMIT", "4.5")
    start = time.monotonic()
    with (
        caplog.at_level(logging.INFO, "eqaccel"),
        pytest.raises(CompileError, match=r"was ended after 4 seconds on the float32 forward kernel .*COMPILE_LIMIT"),
    ):
        _compile()
    assert 4.5 < time.monotonic() - start < 60
    _assert_nothing_left(processes, cache_folder)
    # It was told before, to whom it may concern.
    assert [record.getMessage() for record in caplog.records] == [
        "compiling the float32 forward kernel (12 to 24 features) for the CPU: 4 s so far"
    ]


@pytest.mark.parametrize("value", ["0", "-1", "ten", "5 s", "nan"])
def test_bad_limit(value: str, cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQACCEL_COMPILE_LIMIT", value)
    with pytest.raises(SettingsError, match=f"EQACCEL_COMPILE_LIMIT: expected seconds > 0, got '{value}'"):
        _compile()


def test_bad_limit_of_an_operator(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQACCEL_COMPILE_LIMIT", "soon")
    spec = TensorProductSpec.channelwise("3x0e+7x1o", "0e+1o", "0e+1o")
    with pytest.raises(SettingsError, match=r"^environment variable EQACCEL_COMPILE_LIMIT: expected seconds"):
        TensorProduct(spec)(*(torch.ones(2, dim) for dim in (spec.x_dim, spec.y_dim, spec.weight_numel)))


@pytest.mark.skipif(shutil.which("ld.gold") is None or shutil.which("g++") is None, reason="needs g++ and gold")
def test_a_faster_linker_is_used_where_it_is_beside_the_compiler(tmp_path: Path, monkeypatch) -> None:
    compiler, linker = tmp_path / "g++", tmp_path / "ld.gold"
    compiler.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} "$@"\n')
    compiler.chmod(0o755)
    text = runtime.Program(payload(SPEC)[0]).source("cpu", "float32", "forward")
    used = []
    for is_there, command in ((False, compiler), (True, compiler), (True, f"env {compiler}")):
        if is_there and not linker.exists():
            linker.symlink_to(shutil.which("ld.gold"))
        monkeypatch.setenv("EQACCEL_CXX", str(command))
        code, log = runtime.compile_cpu(text, "cpu-generic")
        assert code.startswith(b"\x7fELF")
        used.append("-fuse-ld=gold" in log)
    assert used == [False, True, False]


def test_one_unit_that_fails_ends_the_others(cache_folder: Path, processes: Path, tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    failing = 'case "$*" in *-DEQ_UNIT=0*) echo "no such thing"; exit 3;; esac\n'
    compiler.write_text(compiler.read_text().replace("sh -c", failing + "sh -c"))
    processes.touch()
    with pytest.raises(CompileError, match=r"failed \(exit status 3\)") as caught:
        runtime.compile_cpu("\n#define EQ_UNITS 3\n", "cpu-generic")
    assert "no such thing" in caught.value.log
    _assert_nothing_left(processes, cache_folder)

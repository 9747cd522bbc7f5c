"""The cache folder: whose files are read, what happens where nothing can be written, and processes that share it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from folders import SUPPORT
from runtime_checks import COMPILE, kept, make_payload, run_python, start_python

import eqaccel
from eqaccel import _runtime, runtime
from eqaccel.__main__ import main
from eqaccel.errors import CacheError, CompileError, MissingCompilerError, SettingsError

RUN = """
import warnings, numpy as np
warnings.simplefilter("always")
x, z = np.ones(3, "float32"), np.zeros(3, "float32")
program = runtime.Program(common.make_payload())
runtime.launch_cpu(program, "float32", "forward", {"x": x, "z": z, "num_receivers": 3})
assert (z == 2).all()
print("cached:", program.compile("cpu", "float32", "forward")["cached"])
"""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


pytestmark = pytest.mark.usefixtures("cache_folder")


def entry_in(cache: Path) -> Path:
    """Compiles a kernel; returns its entry."""
    runtime.Program(make_payload()).compile("cpu", "float32", "forward")
    (entry,) = kept(cache)
    return entry


def assert_refused(path: Path, reason: str, cached: bool = False) -> None:
    """A fresh process says once that it does not use a path, and computes all the same."""
    output = run_python(RUN)
    assert f"cached: {cached}" in output
    assert output.count("CacheWarning") == 1, output
    assert f"'{path}' is refused ({reason}" in output
    assert "EQACCEL_CACHE_DIR" in output


@pytest.mark.parametrize(
    ("mode", "reason"), [(0o777, "every user can"), (0o1777, "every user can"), (0o770, "its group")]
)
def test_folders_that_others_write_are_not_used(mode: int, reason: str, cache_folder: Path) -> None:
    entry_in(cache_folder)
    cache_folder.chmod(mode)
    before = kept(cache_folder)
    assert_refused(cache_folder, reason)
    assert kept(cache_folder) == before, "nothing is written there"


@pytest.mark.parametrize("mode", [0o666, 0o664])
def test_files_that_others_write_are_not_loaded(mode: int, cache_folder: Path) -> None:
    entry = entry_in(cache_folder)
    entry.chmod(mode)
    assert_refused(entry, "every user can" if mode == 0o666 else "its group", cached=True)
    assert entry.stat().st_mode & 0o022 == 0, "one of our own has taken its place"


@needs_root
def test_what_belongs_to_others_is_not_used(cache_folder: Path) -> None:
    entry = entry_in(cache_folder)
    os.chown(entry, 12345, -1)
    assert_refused(entry, "it belongs to user 12345", cached=True)
    os.chown(cache_folder, 12345, -1)
    assert_refused(cache_folder, "it belongs to user 12345")


OTHER_USER = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups"]


def out_of_reach() -> str:
    """What of this installation another user cannot read or start; empty where that user can run it."""
    files = [Path(file) for file in (np.__file__, eqaccel.__file__, _runtime.__file__, __file__)]
    files += [file for file in [Path(sys.prefix) / "pyvenv.cfg"] if file.exists()]
    for file in files:
        if subprocess.run([*OTHER_USER, "test", "-r", file], check=False).returncode:
            return str(file)
    starts = subprocess.run([*OTHER_USER, sys.executable, "-c", ""], cwd="/", capture_output=True, check=False)
    return sys.executable if starts.returncode else ""


@needs_root
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv is not installed")
def test_a_folder_of_the_administrator_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read by a user who cannot write there."""
    if file := out_of_reach():
        pytest.skip(f"another user cannot reach {file}")
    with tempfile.TemporaryDirectory() as shared:
        cache = Path(shared)
        cache.chmod(0o755)
        monkeypatch.setenv("EQACCEL_CACHE_DIR", shared)
        entry = entry_in(cache)
        script = f"import sys; sys.path[:0] = {[str(SUPPORT)]!r}; import runtime_checks as common\n"
        script += "from eqaccel import runtime\n" + RUN + "assert runtime.cache_content().problem == ''\n"
        command = [*OTHER_USER, sys.executable, "-c", script]
        done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, "cached: True\n"), done.stderr
        assert "CacheWarning" not in done.stderr
        assert kept(cache) == [entry]


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)
    os.chdir(here)


def make_link(path: Path) -> None:
    elsewhere = path.parent.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


@pytest.mark.parametrize("make", [make_fifo, make_socket, Path.mkdir, make_link])
def test_entries_that_are_no_files(make: Callable[[Path], None], cache_folder: Path) -> None:
    entry = entry_in(cache_folder)
    if make is not make_link:
        entry.unlink()
    make(entry)
    reasons = {make_fifo: "it is a pipe", make_socket: "No such device", Path.mkdir: "it is a folder"}
    # A folder cannot be replaced by a file: the kernel is kept in memory alone.
    assert_refused(entry, reasons.get(make, "it is a symbolic link"), cached=make is not Path.mkdir)


def test_a_folder_may_be_a_link(cache_folder: Path, tmp_path: Path) -> None:
    entry_in(cache_folder)
    cache_folder.rename(tmp_path / "scratch")
    cache_folder.symlink_to(tmp_path / "scratch")
    assert "cached: True" in run_python(RUN)


def test_what_is_loaded_is_what_was_read(cache_folder: Path) -> None:
    """Bytes that come into the file afterwards are never run: libraries are loaded from memory."""
    entry_in(cache_folder)
    output = run_python(RUN + "print(open('/proc/self/maps').read())\n")
    assert str(cache_folder) not in output
    assert "eqaccel-kernel" in output


def test_files_are_not_for_others_to_write(cache_folder: Path) -> None:
    run_python("import os; os.umask(0)" + RUN)
    assert cache_folder.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o022 == 0 for path in cache_folder.iterdir())


def test_names_stay_in_the_folder() -> None:
    for name in ("../x", "a/b", "", ".."):
        with pytest.raises(ValueError, match="name: expected the name of a file"):
            _runtime.read_cached(name)


# Full disks: a library that refuses every write below a folder, to this process and to compilers.

FULL_DISK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>
static int is_full(int file) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t size = readlink(link, path, sizeof path - 1);
  if (size < 0) return 0;
  path[size] = 0;
  const char* full = getenv("FULL");
  return full && strncmp(path, full, strlen(full)) == 0;
}
ssize_t write(int file, const void* data, size_t size) {
  static ssize_t (*next)(int, const void*, size_t);
  if (!next) next = dlsym(RTLD_NEXT, "write");
  if (is_full(file)) return errno = atoi(getenv("FULL_ERRNO")), -1;
  return next(file, data, size);
}
ssize_t writev(int file, const struct iovec* parts, int count) {
  static ssize_t (*next)(int, const struct iovec*, int);
  if (!next) next = dlsym(RTLD_NEXT, "writev");
  if (is_full(file)) return errno = atoi(getenv("FULL_ERRNO")), -1;
  return next(file, parts, count);
}
"""


@pytest.fixture
def full_disk(tmp_path: Path) -> dict[str, str]:
    library = tmp_path / "full.so"
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library), "-ldl"]
    subprocess.run(command, input=FULL_DISK, text=True, check=True)
    return {"LD_PRELOAD": str(library)}


@pytest.mark.parametrize("reason", ["ENOSPC", "EDQUOT"])
def test_a_full_disk_is_done_without(reason: str, full_disk: dict[str, str], cache_folder: Path) -> None:
    import errno

    number = getattr(errno, reason)
    output = run_python(RUN, **full_disk, FULL=str(cache_folder), FULL_ERRNO=str(number))
    assert "cached: False" in output
    assert output.count("CacheWarning") == 1, output
    assert os.strerror(number) in output
    assert kept(cache_folder) == [], "nothing half-written stays"


def test_no_room_anywhere_is_told(full_disk: dict[str, str]) -> None:
    script = """
    from eqaccel.errors import CompileError
    try:
        runtime.Program(common.make_payload()).compile("cpu", "float32", "forward")
    except CompileError as error:
        print("CompileError", error)
    """
    process = start_python(script, **full_disk, FULL="/", FULL_ERRNO="28")
    output = process.communicate(timeout=120)[0]
    # stdout is a pipe, which is not below "/", so the message comes through.
    assert "there is no room to compile a kernel: tried" in output, output
    assert "Set TMPDIR" in output


def test_a_folder_that_cannot_be_written_is_read(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry_in(cache_folder)
    cache_folder.chmod(0o500)
    assert "cached: True" in run_python(RUN)
    cache_folder.chmod(0o700)


# Without a compiler.


def test_a_warm_cache_needs_no_compiler(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = entry_in(cache_folder)
    monkeypatch.delenv("CXX", raising=False)
    for environment in ({"PATH": "/nonexistent"}, {"EQACCEL_CXX": "/nonexistent/g++"}):
        assert "cached: True" in run_python(RUN, **environment)
    # Another source, or an entry that is damaged, needs one.
    monkeypatch.setenv("EQACCEL_CXX", "/nonexistent/g++")
    with pytest.raises(MissingCompilerError, match="EQACCEL_CXX names"):
        runtime.Program(make_payload()).compile("cpu", "float64", "forward")
    entry.write_bytes(entry.read_bytes()[:-1])
    with pytest.raises(MissingCompilerError, match="EQACCEL_CXX names"):
        runtime.Program(make_payload()).compile("cpu", "float32", "forward")


def test_each_compiler_has_entries_of_its_own(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = runtime.Program(make_payload()).compile("cpu", "float32", "forward")
    monkeypatch.setenv("EQACCEL_CXX", "env g++")
    second = runtime.Program(make_payload()).compile("cpu", "float32", "forward")
    assert not second["cached"]
    assert first["key"][:40] == second["key"][:40] != first["key"]
    os.utime(first["path"], (time.time() + 60,) * 2)
    monkeypatch.setenv("EQACCEL_CXX", "/nonexistent/g++")
    found = runtime.Program(make_payload()).compile("cpu", "float32", "forward")
    assert found["cached"]
    assert found["key"] == first["key"], "the one that was written last"


@pytest.mark.skipif(runtime.locate_nvrtc() is None, reason="the nvidia-cuda-nvrtc package is not installed")
def test_a_warm_cache_needs_no_nvrtc(cache_folder: Path) -> None:
    script = """
    program = runtime.Program(common.make_payload())
    print(runtime.compile_program(program, "cuda", "float32", "forward", "sm_90")["cached"])
    """
    assert run_python(script) == "False\n"
    assert run_python(script, EQACCEL_NVRTC="/nonexistent") == "True\n"
    process = start_python(script.replace("sm_90", "sm_80"), EQACCEL_NVRTC="/nonexistent")
    assert "EQACCEL_NVRTC names '/nonexistent'" in process.communicate(timeout=120)[0]


# Several processes.


def counting_compiler(folder: Path, work: str = "") -> tuple[Path, Path]:
    """A compiler that writes a line to a file whenever it compiles, after some work."""
    count, compiler = folder / "count", folder / "c++"
    count.touch()
    command = " ".join(runtime.host_compiler()["command"])
    lines = (
        f'#!/bin/sh\nif [ "$1" != --version ]; then echo compiled >> {count}; {work or ":"}; fi\nexec {command} "$@"\n'
    )
    compiler.write_text(lines)
    compiler.chmod(0o755)
    return compiler, count


def test_one_process_compiles_and_the_others_wait(tmp_path: Path) -> None:
    compiler, count = counting_compiler(tmp_path, "sleep 2")
    processes = [start_python(COMPILE, EQACCEL_CXX=str(compiler)) for _ in range(4)]
    outputs = [process.communicate(timeout=120)[0].split()[0] for process in processes]
    assert sorted(outputs) == ["False", "True", "True", "True"]
    assert count.read_text().splitlines() == ["compiled"]


def wait_for_lines(count: Path, lines: int) -> None:
    deadline = time.time() + 60
    while len(count.read_text().splitlines()) < lines:
        assert time.time() < deadline
        time.sleep(0.02)


def test_who_waits_goes_on_if_the_other_dies(tmp_path: Path) -> None:
    flag = tmp_path / "first"
    compiler, count = counting_compiler(tmp_path, f"mkdir {flag} 2> /dev/null && sleep 600")
    first = start_python(COMPILE, EQACCEL_CXX=str(compiler))
    wait_for_lines(count, 1)
    second = start_python(COMPILE, EQACCEL_CXX=str(compiler))
    time.sleep(1)
    assert second.poll() is None
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    output = second.communicate(timeout=120)[0]
    assert output.startswith("False"), output
    assert len(count.read_text().splitlines()) == 2


@pytest.mark.parametrize("way", ["runtime", "torch"])
def test_who_waits_can_be_interrupted(way: str, tmp_path: Path) -> None:
    compiler, count = counting_compiler(tmp_path, "sleep 600")
    script = """
    import torch
    from eqaccel import TensorProduct, TensorProductSpec
    module = TensorProduct(TensorProductSpec.channelwise("6x0e", "0e+1o", "0e+1o"))
    program, key = runtime.register_program(module.key, module.payload.numpy().tobytes()), module.key
    print("starts", flush=True)
    """
    script += {
        "runtime": 'program.compile("cpu", "float32", "forward")\n',
        "torch": "module(torch.ones(2, 6), torch.ones(2, 4), torch.ones(12))\n",
    }[way]
    first = start_python(script, EQACCEL_CXX=str(compiler))
    wait_for_lines(count, 1)
    second = start_python(script, EQACCEL_CXX=str(compiler))
    assert second.stdout.readline() == "starts\n"
    time.sleep(1)
    assert second.poll() is None
    second.send_signal(signal.SIGINT)
    output = second.communicate(timeout=20)[0]
    assert "KeyboardInterrupt" in output
    assert len(count.read_text().splitlines()) == 1
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()


# Size.


def test_entries_not_used_for_longest_go(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    payloads = [make_payload(meta=f"x_dim={n}\nz_dim={n}\n", cpu=make_body(n)) for n in range(4)]
    compiled = [runtime.Program(payload).compile("cpu", "float32", "forward") for payload in payloads[:3]]
    now = time.time()
    for age, one in zip((100, 300, 200), compiled, strict=True):
        os.utime(one["path"], (now - age * 3600,) * 2)
    assert runtime.Program(payloads[1]).compile("cpu", "float32", "forward")["cached"], "used again"
    monkeypatch.setenv("EQACCEL_CACHE_LIMIT", "1")
    filler = cache_folder / ("0" * 40 + "-" + "0" * 16 + ".so")
    filler.write_bytes(bytes(2**20 - 2 * os.stat(compiled[0]["path"]).st_size - 10_000))
    last = runtime.Program(payloads[3]).compile("cpu", "float32", "forward")
    left = {path.name for path in kept(cache_folder)}
    assert Path(compiled[2]["path"]).name not in left
    assert {Path(one["path"]).name for one in (compiled[1], last)} <= left
    assert sum(path.stat().st_size for path in kept(cache_folder)) <= 2**20


def make_body(number: int) -> str:
    from runtime_checks import SCALE_BODY

    return SCALE_BODY + f"// {number}\n"


def test_no_limit_and_limits_that_are_none(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQACCEL_CACHE_LIMIT", "0")
    entry_in(cache_folder)
    monkeypatch.setenv("EQACCEL_CACHE_LIMIT", "2GB")
    with pytest.raises(SettingsError, match=r"EQACCEL_CACHE_LIMIT: expected a whole number of MiB .*, got '2GB'"):
        runtime.Program(make_payload()).compile("cpu", "float64", "forward")


# The command.


def test_the_command_shows_and_empties(cache_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache"]) == 0
    assert f"folder: {cache_folder}\n" in capsys.readouterr().out
    entry_in(cache_folder)
    runtime.write_record("tuned-" + "0" * 40, {})
    (cache_folder / "lammps/0").mkdir(parents=True)
    (cache_folder / "lammps/0/eqaccelplugin.so").write_bytes(b"")
    mine = cache_folder / "mine.txt"
    mine.write_text("kept")
    assert main(["cache"]) == 0
    shown = capsys.readouterr().out
    for kind, count in (("CPU kernels", 1), ("GPU kernels", 0), ("tuned kernels", 1), ("LAMMPS plugins", 1)):
        (line,) = (line for line in shown.splitlines() if line.strip().startswith(kind))
        assert int(line.split()[-3]) == count, line
    assert "(limit: 2048 MiB, EQACCEL_CACHE_LIMIT)" in shown
    assert main(["cache", "--clear"]) == 0
    assert kept(cache_folder) == [mine], "what is not eqaccel's stays"


def test_a_folder_that_is_not_used_is_not_emptied(cache_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry = entry_in(cache_folder)
    cache_folder.chmod(0o777)
    assert main(["cache", "--clear"]) == 1
    assert "the cache is not emptied" in capsys.readouterr().err
    with pytest.raises(CacheError, match="every user can write it"):
        runtime.clear_cache()
    assert entry.exists()
    assert main(["doctor"]) == 0
    assert f"{cache_folder}, not used: '{cache_folder}' is refused (every user can write it" in capsys.readouterr().out


def test_both_languages_name_one_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in ("EQACCEL_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert runtime.cache_dir() == str(tmp_path / ".cache/eqaccel") == runtime.cache_content().folder
    monkeypatch.setenv("XDG_CACHE_HOME", "~/xdg")
    assert runtime.cache_dir() == str(tmp_path / "xdg/eqaccel")


# What LAMMPS loads by its path.


def test_paths_count_with_the_folders_above_them(tmp_path: Path) -> None:
    folder = tmp_path / "shared" / "mine"
    folder.mkdir(parents=True)
    file = folder / "plugin.so"
    file.write_bytes(b"")
    assert runtime.distrust_path(str(file)) == ""
    for part, reason in ((file, "every user can write it"), (folder, "every user"), (folder.parent, "every user")):
        mode = part.stat().st_mode
        part.chmod(0o777)
        assert f"'{part}': {reason}" in runtime.distrust_path(str(file))
        part.chmod(mode)
    folder.parent.chmod(0o1777)
    assert runtime.distrust_path(str(file)) == "", "the sticky bit protects what others own"
    assert "No such file" in runtime.distrust_path(str(folder / "absent"))


def test_a_plugin_that_others_can_write_is_refused(cache_folder: Path) -> None:
    lammps = pytest.importorskip("eqaccel.integrations.lammps")
    plugin = cache_folder / "lammps" / "x" / lammps.PLUGIN
    plugin.parent.mkdir(parents=True)
    plugin.write_bytes(b"")
    assert lammps._trusted(plugin) == plugin
    plugin.chmod(0o666)
    with pytest.raises(CompileError, match=r"the LAMMPS plugin .* is refused .*every user can write it"):
        lammps._trusted(plugin)
    plugin.unlink()
    plugin.symlink_to("/etc/hostname")
    with pytest.raises(CompileError, match="symbolic link"):
        lammps._trusted(plugin)

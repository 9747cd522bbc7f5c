"""Bytes that come from files and may be damaged: each change gives an error or the same numbers, and never a crash.

Changes are made in processes of their own, whose crash fails the test.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import hosts
import pytest
from folders import ROOT
from runtime_checks import make_payload, run_python

CHANGES = '''
import random
from collections.abc import Iterator

def changes(content: bytes, positions) -> Iterator[bytes]:
    """A flipped bit, a removed byte and an inserted one at each position."""
    rng = random.Random(0)
    for at in positions:
        yield content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
        yield content[:at] + content[at + 1 :]
        yield content[:at] + bytes([rng.randrange(256)]) + content[at:]
'''


pytestmark = pytest.mark.usefixtures("cache_folder")


PAYLOADS = {
    "small": ("common.make_payload()", "range(len(content))"),
    "tensor product": (
        'payload(TensorProductSpec.channelwise("4x0e+4x1o", "0e+1o", "0e+1o"))[0]',
        "random.Random(1).sample(range(len(content)), 200)",
    ),
    "polynomial": (
        "polynomial_payload(PolynomialSpec(2, 2, 1, (Term(0, 0, (0,), 1.5), Term(0, 1, (0, 1, 1), 0.5))))[0]",
        "random.Random(1).sample(range(len(content)), 200)",
    ),
    "linear": (
        'linear_payload(LinearSpec("2x0e+1x1o", "1x0e+2x1o", ((0, 0, 1.5), (1, 1, 0.5)), 2))[0]',
        "random.Random(1).sample(range(len(content)), 200)",
    ),
    "matrix product": ("matrix_payload()[0]", "random.Random(1).sample(range(len(content)), 200)"),
}


@pytest.mark.parametrize("name", PAYLOADS)
def test_payloads_that_were_damaged_are_refused(name: str) -> None:
    """With the key that travels beside a payload; without it, what can be read is read and the rest is an error."""
    content, positions = PAYLOADS[name]
    output = run_python(
        CHANGES
        + f"""
from eqaccel import codegen
from eqaccel.errors import CompileError
from eqaccel.families.linear import LinearSpec, linear_payload
from eqaccel.families.matrix_product import matrix_payload
from eqaccel.families.polynomial import PolynomialSpec, Term, polynomial_payload
from eqaccel.families.tensor_product import TensorProductSpec, payload
content = {content}
positions = {positions}
key = codegen.payload_key(content)
refused = total = 0
for changed in changes(content, positions):
    if changed == content:
        continue
    total += 1
    try:
        runtime.register_program(key, changed)
    except ValueError as error:
        assert str(error).startswith("payload: expected"), error
        refused += 1
    try:
        program = runtime.Program(changed)
        for number in ("x_dim", "abi", "row_threads"):
            program.number(number)
        program.source("cpu", "float32", "forward")
        program.source("cuda", "float32", "forward", "sm_90")
    except (ValueError, IndexError, CompileError):  # the last where the name of a body was damaged
        pass
assert total >= 500 and refused == total, (refused, total)
assert runtime.find_program(key) is None
runtime.register_program(key, content)
print("done")
"""
    )
    assert output == "done\n"


def test_damaged_payloads_are_read_within_their_memory(tmp_path: Path) -> None:
    """The C++ readers by themselves, with checks of every access."""
    options = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    options += [f"-I{ROOT / 'csrc' / folder}" for folder in ("runtime", "model")]
    program = hosts.build("payload.cpp", tmp_path, *options)
    for kernel in (b"", b"binary/cpu-avx2/forward/float32 4\ncode\n"):
        (tmp_path / "payload").write_bytes(make_payload() + kernel)
        command = [str(program), str(tmp_path / "payload"), "0", "4000"]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        refused, other_key, native = (int(part.split()[0]) for part in ran.stdout.split(", "))
        assert refused > 1000
        assert other_key == 4000
        assert bool(native) == bool(kernel)


def test_damaged_entries_of_the_cache_are_not_loaded(cache_folder: Path) -> None:
    output = run_python(
        CHANGES
        + """
import os
from pathlib import Path
from eqaccel.errors import MissingCompilerError
program = runtime.Program(common.make_payload())
entry = Path(program.compile("cpu", "float32", "forward")["path"])
content = entry.read_bytes()
os.environ["EQACCEL_CXX"] = "/nonexistent"  # so that an entry that is refused is not made again
positions = random.Random(2).sample(range(len(content)), 200)
for changed in changes(content, [*positions, *range(len(content) - 120, len(content))]):
    entry.write_bytes(changed)
    try:
        assert changed == content or not program.compile("cpu", "float32", "forward")["cached"]
    except MissingCompilerError:
        pass
entry.write_bytes(content)
assert program.compile("cpu", "float32", "forward")["cached"]
print("done")
"""
    )
    assert output == "done\n"


def test_self_checks_of_damaged_checksums_stay_in_their_memory() -> None:
    """An embedded kernel, and an entry about its check that somebody changed together with the key."""
    output = run_python(
        CHANGES
        + """
import re
from eqaccel.errors import CompileError
from eqaccel.families.tensor_product import TensorProductSpec, payload
from eqaccel.targets import host_target
content = payload(TensorProductSpec.channelwise("2x0e+1x1o", "0e+1o", "0e+1o"))[0]
program = runtime.Program(content)
target = host_target().name
code, _ = program.compile_for(target, "float64", "forward", program.source("cpu", "float64", "forward"))
binary = f"binary/{target}/forward/float64 {len(code)}\\n".encode() + code + b"\\n"
runtime.Program(content + binary).compile("cpu", "float64", "forward")
outcomes = {"passed": 0, "refused": 0}
for name in ("check/blocks", "check/forward", "meta"):
    header = re.search(rb"(?:^|\\n)" + name.encode() + rb" (\\d+)\\n", content)
    size = int(header[1])
    text = content[header.end() : header.end() + size]
    rest = content[: header.start(1)], content[header.end() + size :]
    for changed in changes(text, range(min(len(text), 120))):
        payload = rest[0] + str(len(changed)).encode() + b"\\n" + changed + rest[1] + binary
        try:
            runtime.Program(payload).compile("cpu", "float64", "forward")
            outcomes["passed"] += 1
        except (ValueError, IndexError, CompileError):
            outcomes["refused"] += 1
assert min(outcomes.values()) > 0, outcomes
print("done")
"""
    )
    assert output == "done\n"


NO_MEMORY = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
void* aligned_alloc(size_t alignment, size_t size) {
  static void* (*next)(size_t, size_t);
  if (!next) next = dlsym(RTLD_NEXT, "aligned_alloc");
  const char* left = getenv("ALLOCATIONS_LEFT");
  if (!left) return next(alignment, size);
  const int count = atoi(left);
  char less[16] = {(char)('0' + count - 1), 0};
  if (count == 0) return NULL;
  setenv("ALLOCATIONS_LEFT", less, 1);
  return next(alignment, size);
}
"""


@pytest.mark.parametrize("direction", ["forward", "backward", "double_backward"])
def test_memory_that_a_kernel_does_not_get(direction: str, tmp_path: Path) -> None:
    """An error, whichever of its requests fails, and the next launch works."""
    library = tmp_path / "no_memory.so"
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library), "-ldl"]
    subprocess.run(command, input=NO_MEMORY, text=True, check=True)
    output = run_python(
        f"""
import ctypes
import numpy as np
from eqaccel.families.tensor_product import TensorProductSpec, payload
program = runtime.Program(payload(TensorProductSpec.channelwise("2x0e", "0e", "0e"))[0])
operands = {{name: np.ones((3, 2)) for name in ("x", "w", "gz", "a", "c", "z", "gx", "gw")}}
operands |= {{name: np.ones((3, 1)) for name in ("y", "b", "gy")}}
operands |= {{"num_receivers": 3, "num_senders": 3, "num_edges": 3, "w_stride": 2, "c_stride": 2, "threads": 2}}
setenv, unsetenv = ctypes.CDLL(None).setenv, ctypes.CDLL(None).unsetenv
runtime.launch_cpu(program, "float64", "{direction}", operands)
failed = 0
for count in range(9):
    setenv(b"ALLOCATIONS_LEFT", str(count).encode(), 1)
    try:
        runtime.launch_cpu(program, "float64", "{direction}", operands)
        break
    except MemoryError as error:
        assert "a kernel for the CPU got none" in str(error), error
        failed += 1
    finally:
        unsetenv(b"ALLOCATIONS_LEFT")
print(failed)
""",
        LD_PRELOAD=str(library),
    )
    assert int(output) == (2 if direction == "forward" else 5)

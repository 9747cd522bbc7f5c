"""The self-check of CPU kernels, compiled or embedded: right ones pass, wrong ones are refused and leave nothing."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from runtime_checks import kept, program, read

from eqaccel import TensorProduct, runtime
from eqaccel.codegen import COMMON, Direction
from eqaccel.errors import CompileError
from eqaccel.families.tensor_product import TENSOR_PRODUCT, TensorProductSpec, check, make_plan, payload
from eqaccel.families.tensor_product.reference import to_ir_mul, to_mul_ir
from eqaccel.targets import host_target

SPECS = {
    "small": TensorProductSpec.channelwise("16x0e+16x1o", "0e+1o+2e", "0e+1o+2e"),
    "ragged": TensorProductSpec.channelwise("33x0e+5x1o+1x2e", "0e+1o", "0e+1o+2e"),
    "untouched blocks": TensorProductSpec(
        "4x1o+0x2e+3x0e", "2e+0e", "3x1o+0x0e+4x1o+2x0e", [(0, 0, 2, "uvu", True, 0.7), (0, 1, 2, "uvu", False)]
    ),
    "unweighted": TensorProductSpec("3x0e+2x1o", "1o", "2x0e+3x1o", [(1, 0, 0, "uvu", False), (0, 0, 1, "uvu", False)]),
}
SCALARS = ("float32", "float64")
TOLERANCE = 128
"""Largest difference of a figure, in eps times the size of its block; `tolerance` in csrc/runtime/self_check.cpp."""

FAULTS = {
    "sign": (r"T\((\d)", r"T(-\1"),
    "index": (r"\* y\[\d\]", "* y[0]"),
    "layout": (r"run\((\d+), (\d+), (\d+)\)", r"run(\1, \3, \2)"),
    "outside": (r"run\((\d+), (\d+), (\d+)\)", r"run(\1 + \2, \2, \3)"),
}
"""Changes to a body, made in the last place where they fit, lest a check of the first elements only should do."""


def content_of(spec: TensorProductSpec, direction: Direction) -> bytes:
    """The payload that has the kernels of a direction."""
    made = TENSOR_PRODUCT.payload_of(spec, direction)
    assert made is not None
    return made[0]


def checksums_of(spec: TensorProductSpec, direction: Direction) -> list[tuple[str, float, tuple[float, ...]]]:
    """Output, size and projections of each block, from the payload."""
    lines = [line.split() for line in read(content_of(spec, direction))[f"check/{direction.value}"].splitlines()]
    return [(name, float(size), tuple(map(float, sums))) for name, size, *sums in lines]


def launch(spec: TensorProductSpec, scalar: str, direction: Direction, mul_ir: bool) -> dict[str, np.ndarray]:
    """The outputs of a kernel for the problem of the check, float64, in the (2l+1, mul) layout."""
    irreps = dict.fromkeys(("x", "a", "p", "gx", "ga"), spec.irreps_in1)
    irreps |= dict.fromkeys(("z", "gz", "g"), spec.irreps_out)
    operands = check.problem(spec, direction)
    rows = {"z": (3, spec.z_dim), "gx": (4, spec.x_dim), "gy": (5, spec.y_dim), "gw": (5, spec.weight_numel)}
    rows |= {"ga": rows["gx"], "gb": rows["gy"], "gc": rows["gw"]}
    operands |= {name: np.full(rows[name], np.nan) for name in check.OUTPUTS[direction]}
    if mul_ir:
        operands |= {name: to_mul_ir(irreps[name], rows) for name, rows in operands.items() if name in irreps}
    operands = {name: np.ascontiguousarray(array, scalar) for name, array in operands.items()}
    edge = np.lexsort((np.arange(5), check.SENDER, check.RECEIVER))
    index = {"row_ptr": np.searchsorted(check.RECEIVER[edge], np.arange(4)), "edge": edge, "sender": check.SENDER[edge]}
    sizes = {"num_receivers": 3, "num_senders": 4, "num_edges": 5, "mul_ir": int(mul_ir)}
    sizes |= dict.fromkeys(("w_stride", "c_stride", "r_stride"), spec.weight_numel)
    index = {name: values.astype("int32") for name, values in index.items()}
    runtime.launch_cpu(runtime.Program(content_of(spec, direction)), scalar, direction.value, operands | index | sizes)
    outputs = {name: operands[name].astype("float64") for name in check.OUTPUTS[direction]}
    return {
        name: to_ir_mul(irreps[name], rows) if mul_ir and name in irreps else rows for name, rows in outputs.items()
    }


@pytest.mark.parametrize("mul_ir", [False, True])
@pytest.mark.parametrize("scalar", SCALARS)
@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("name", SPECS)
def test_right_kernels_pass_and_give_the_checksums(name: str, direction: Direction, scalar: str, mul_ir: bool) -> None:
    spec = SPECS[name]
    outputs = launch(spec, scalar, direction, mul_ir)  # compiles, so the runtime has checked it too
    found = [
        (output, sums) for output in check.OUTPUTS[direction] for sums in check.project(spec, output, outputs[output])
    ]
    expected = checksums_of(spec, direction)
    assert [output for output, _ in found] == [output for output, _, _ in expected]
    for (output, sums), (_, size, right) in zip(found, expected, strict=True):
        # A tenth of what the check allows, so that it does not refuse a right kernel by chance.
        assert np.abs(np.subtract(sums, right)).max() <= 0.1 * TOLERANCE * np.finfo(scalar).eps * size, output


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("name", SPECS)
def test_one_wrong_element_is_noticed(name: str, direction: Direction) -> None:
    spec = SPECS[name]
    outputs = launch(spec, "float64", direction, mul_ir=False)
    rng = np.random.default_rng(0)
    expected = checksums_of(spec, direction)
    for output, right in outputs.items():
        bounds = np.array([TOLERANCE * np.finfo("float32").eps * size for key, size, _ in expected if key == output])
        for element in rng.choice(right.size, min(right.size, 20), replace=False):
            if abs(right.flat[element]) < 1e-2 * np.abs(right).max():  # rounding of float32 may hide it
                continue
            wrong = right.copy()
            wrong.flat[element] = 0
            changes = np.subtract(check.project(spec, output, wrong), check.project(spec, output, right))
            noticed = np.abs(changes.T) > bounds
            assert noticed.any(1).all(), f"{output}, element {element}: both projections notice it"


def spoil(direction: Direction, fault: str) -> dict[str, str]:
    """The entries of a payload with a fault in one body."""
    entries = read(content_of(SPECS["small"], direction))
    body = entries[f"cpu/{direction.value}"]
    pattern, replacement = FAULTS[fault]
    *_, place = re.finditer(pattern, body)
    return entries | {f"cpu/{direction.value}": body[: place.start()] + place.expand(replacement) + body[place.end() :]}


@pytest.mark.parametrize(
    ("fault", "direction", "scalar"),
    [
        (fault, direction, SCALARS[(m + n) % 2])
        for m, fault in enumerate(("sign", "index", "layout"))
        for n, direction in enumerate(Direction)
    ],
)
def test_wrong_kernels_are_refused(
    fault: str, direction: Direction, scalar: str, cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EQACCEL_DUMP", str(tmp_path / "dump"))
    wrong = program(spoil(direction, fault))
    with pytest.raises(CompileError) as error:
        runtime.launch_cpu(wrong, scalar, direction.value, {})
    assert type(error.value) is CompileError
    assert str(error.value).startswith(f"the {scalar} {direction.value} kernel for the CPU computes wrong results")
    assert runtime.host_compiler()["version"] in str(error.value)
    assert "EQACCEL_CXX" in str(error.value)
    assert "-O2" in error.value.log, "the command is part of the log"
    found = error.value.log.partition("self-check:\n")[2]
    assert re.search(r"block \d+, mul_ir layout: projection .* expected, \+-.*, got", found)
    assert ("ir_mul layout" in found) == (fault != "layout")
    assert kept(cache_folder) == []
    assert {path.suffix for path in (tmp_path / "dump").iterdir()} == {".cpp", ".log", ".plan", ".resources"}
    (plan,) = (tmp_path / "dump").glob("*.plan")
    assert plan.read_text() == make_plan(SPECS["small"], direction, host_target(), 4).explain() + "\n"


@pytest.mark.parametrize("scalar", SCALARS)
def test_writing_outside_is_noticed(scalar: str, cache_folder: Path) -> None:
    with pytest.raises(CompileError) as error:
        program(spoil(Direction.FORWARD, "outside")).compile("cpu", scalar, "forward")
    assert "writes outside of its operands" in error.value.log


@pytest.mark.parametrize("direction", COMMON)
def test_kernels_of_rows_that_share_weights_are_checked(direction: Direction, cache_folder: Path) -> None:
    """Of such a batch, too, which other code computes."""
    paths = [(0, 0, 0, "uvw"), (1, 1, 0, "uvw"), (0, 1, 1, "uvu")]
    whole = TensorProductSpec("3x0e+2x1o", "2x0e+3x1o", "5x0e+3x1o", paths, shared_weights=True)
    entries = read(content_of(whole.with_layout("mul_ir", by_rows=True), direction))
    prelude = entries["prelude/cpu"].replace("factors += M::along", "factors += 0")
    with pytest.raises(CompileError, match="wrong results"):
        runtime.launch_cpu(program(entries | {"prelude/cpu": prelude}), "float32", direction.value, {})
    assert kept(cache_folder) == []
    program(entries).compile("cpu", "float32", direction.value)
    assert kept(cache_folder)


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that reads y[0] for y[1] as long as the file that this gives exists."""
    flag, compiler = tmp_path / "faulty", tmp_path / "c++"
    command = shlex.join(runtime.host_compiler()["command"])
    spoil_source = f"[ -e {flag} ] && for source; do :; done && sed -i 's/y\\[1\\]/y[0]/' \"$source\""
    compiler.write_text(f'#!/bin/sh\n[ "$1" != --version ] && {spoil_source}\nexec {command} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("EQACCEL_CXX", str(compiler))
    flag.touch()
    return flag


def test_faulty_compiler(faulty: Path, cache_folder: Path) -> None:
    """The error reaches users of torch, and another attempt with a good compiler succeeds."""
    module = TensorProduct(TensorProductSpec.channelwise("6x0e", "0e+1o", "0e+1o"))
    operands = (torch.ones(2, 6), torch.ones(2, 4), torch.ones(12))
    with pytest.raises(CompileError, match="wrong results") as error:
        module(*operands)
    assert "self-check:\nz, block 1" in error.value.log
    assert kept(cache_folder) == []
    faulty.unlink()
    assert module(*operands).shape == (2, 24)


def test_rebuilt_entries_are_checked(faulty: Path, cache_folder: Path) -> None:
    faulty.unlink()
    right = runtime.Program(payload(SPECS["small"])[0])
    right.compile("cpu", "float32", "forward")
    (entry,) = kept(cache_folder)
    entry.write_bytes(entry.read_bytes()[:-100])
    faulty.touch()
    with pytest.raises(CompileError, match="wrong results"):
        right.compile("cpu", "float32", "forward")
    faulty.unlink()
    assert not right.compile("cpu", "float32", "forward")["cached"]
    assert right.compile("cpu", "float32", "forward")["cached"]


def test_unchecked_kernels_stand_for_nothing(cache_folder: Path) -> None:
    """A payload without checksums gives kernels, but not to payloads with checksums."""
    entries = read(payload(SPECS["small"])[0])
    bare = {name: text for name, text in entries.items() if not name.startswith("check/")}
    assert not program(bare).compile("cpu", "float32", "forward")["cached"]
    assert not program(entries).compile("cpu", "float32", "forward")["cached"]


@pytest.mark.parametrize("checksums", ["", "gx 1 1 1\n", "z 1 1\n", "z one 1 1\n"])
def test_checksums_that_do_not_fit(checksums: str, cache_folder: Path) -> None:
    entries = read(payload(SPECS["small"])[0]) | {"check/forward": checksums}
    with pytest.raises(ValueError, match="self-check checksums"):
        program(entries).compile("cpu", "float32", "forward")
    del entries["check/blocks"]
    with pytest.raises(IndexError, match="no entry 'check/blocks'"):
        program(entries).compile("cpu", "float32", "forward")


@pytest.mark.parametrize("blocks", ["x 16 1\n", "x 16 1\nx 999999999 999999999\n", "q 1 1\n", "x -16 1\n", "x one 1\n"])
def test_blocks_that_do_not_fit(blocks: str, cache_folder: Path) -> None:
    """A kernel that was made for other rows would reach outside of those of the check."""
    entries = read(payload(SPECS["small"])[0]) | {"check/blocks": blocks}
    with pytest.raises(ValueError, match="self-check checksums"):
        program(entries).compile("cpu", "float32", "forward")


def embed(entries: dict[str, str], source: dict[str, str], target: str = host_target().name) -> bytes:
    """A payload that holds a compiled forward kernel, made of the source of another payload, as exported files do."""
    text = program(source).source("cpu", "float32", "forward")
    bare = {name: text for name, text in source.items() if not name.startswith("check/")}
    code, _ = program(bare).compile_for(target, "float32", "forward", text)
    parts = [f"{name} {len(text.encode())}\n{text}\n".encode() for name, text in entries.items()]
    parts.append(f"binary/{target}/forward/float32 {len(code)}\n".encode() + code + b"\n")
    return b"EQACCEL-PAYLOAD 1\n" + b"".join(parts)


RUN_EMBEDDED = """
import sys
from pathlib import Path
from eqaccel import codegen, runtime
content = Path(sys.argv[1]).read_bytes()
program = runtime.register_program(codegen.payload_key(content), content)
for _ in range(2):
    program.compile("cpu", "float32", "forward")
print(program.workspace_bytes("cpu", "float32", "forward", {"num_edges": 1}) >= 0)
"""


def run_embedded(file: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", RUN_EMBEDDED, str(file)]
    environment = os.environ | {"EQACCEL_CXX": "/nonexistent"}
    return subprocess.run(command, cwd=file.parent, env=environment, capture_output=True, text=True, check=False)


def test_embedded_kernels_are_checked_and_the_cache_remembers_it(cache_folder: Path, tmp_path: Path) -> None:
    right = read(payload(SPECS["small"])[0])
    (tmp_path / "right").write_bytes(embed(right, right))
    (tmp_path / "wrong").write_bytes(embed(right, spoil(Direction.FORWARD, "sign")))
    for _ in range(2):
        done = run_embedded(tmp_path / "wrong")
        assert done.returncode != 0
        assert "CompileError: the float32 forward kernel for the CPU computes wrong results as the model's file" in (
            done.stderr
        )
        assert not [path for path in kept(cache_folder) if path.suffix == ".ok"]
    for _ in range(2):
        done = run_embedded(tmp_path / "right")
        assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
        assert [path.suffix for path in kept(cache_folder)] == [".ok"]


def test_embedded_kernels_are_checked_without_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = read(payload(SPECS["small"])[0])
    (tmp_path / "right").write_bytes(embed(right, right))
    (tmp_path / "wrong").write_bytes(embed(right, spoil(Direction.FORWARD, "index")))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EQACCEL_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert "computes wrong results" in run_embedded(tmp_path / "wrong").stderr
    assert run_embedded(tmp_path / "right").returncode == 0


def test_kernels_are_checked_before_they_are_embedded(faulty: Path, cache_folder: Path) -> None:
    right = program(read(payload(SPECS["small"])[0]))
    text = right.source("cpu", "float32", "forward")
    with pytest.raises(CompileError, match=r"computes wrong results as .* compiled it for"):
        right.compile_for(host_target().name, "float32", "forward", text)
    faulty.unlink()
    assert right.compile_for(host_target().name, "float32", "forward", text)[0].startswith(b"\x7fELF")


def test_graph_of_the_problem() -> None:
    pairs = list(zip(check.RECEIVER.tolist(), check.SENDER.tolist(), strict=True))
    assert pairs != sorted(pairs), "edges are not in order"
    assert len(set(pairs)) < len(pairs), "a pair of nodes has two edges"
    assert set(check.RECEIVER) == {0, 2}, "receiver 1 has no edge"
    assert set(check.SENDER) == {0, 1, 3}, "sender 2 has no edge"
    for name, values in check.problem(SPECS["small"], Direction.DOUBLE_BACKWARD).items():
        assert (values.astype("float32") == values).all(), name
        assert abs(values).min() >= 1, name
        assert abs(values).max() < 2, name
        assert abs(values.mean()) < 4 / np.sqrt(values.size), f"{name} is signed"
    plan = make_plan(SPECS["small"], Direction.BACKWARD, host_target(), 4)
    assert check.checksums(plan) == check.checksums(plan) == read(payload(SPECS["small"])[0])["check/backward"]

"""Exported files as bytes: what is not as it was written is refused in Python and in C++, and never run."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
from pathlib import Path
from typing import Any

import hosts
import pytest
import torch
from lammps_toy import DESCRIPTION, Precompiled, save_model, save_toy

import eqaccel
from eqaccel.errors import ExportError, OperandError
from eqaccel.integrations.export.digest import DIGITS, append_digest
from eqaccel.integrations.export.loading import Exported
from eqaccel.ops import library_path

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return Path(save_toy(tmp_path / "toy.pt"))


def mutations(content: bytes, count: int) -> list[bytes]:
    """The content with a bit flipped, a byte removed, or a byte put in: at the ends, and at places drawn by lot."""
    generator = random.Random(0)
    last = len(content) - 1
    places = [0, 1, last - DIGITS - 1, last - DIGITS, last - DIGITS + 1, last - 1, last]
    places += [generator.randrange(len(content)) for _ in range(count)]
    found = []
    for place in places:
        flipped = bytes([content[place] ^ (1 << generator.randrange(8))])
        found.append(content[:place] + flipped + content[place + 1 :])
        found.append(content[:place] + content[place + 1 :])
        found.append(content[:place] + bytes([generator.randrange(256)]) + content[place:])
        found.append(content[:place])
    return [changed for changed in found if changed != content]


def test_damaged_files_are_refused(file: Path) -> None:
    content, damaged = file.read_bytes(), file.with_name("damaged.pt")
    for changed in mutations(content, 200):
        damaged.write_bytes(changed)
        with pytest.raises(ExportError, match=r"is damaged|is incomplete|is empty"):
            eqaccel.load_exported(damaged)
    damaged.write_bytes(content)
    eqaccel.load_exported(damaged)


@pytest.mark.slow
def test_damaged_files_are_refused_without_python(file: Path, tmp_path: Path) -> None:
    """A program that opens every one of them reads an error, and goes on."""
    program = hosts.build("damaged.cpp", tmp_path)
    content = file.read_bytes()
    for number, changed in enumerate([content, *mutations(content, 200)]):
        (tmp_path / f"{number}.bin").write_bytes(changed)
    ran = subprocess.run(
        [program, library_path().with_name("libeqaccel_model.so"), tmp_path, str(number + 1)],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    first, *lines = ran.stdout.splitlines()
    assert first == "opened"
    assert len(lines) == number
    assert all(re.search("is damaged|is incomplete|is empty", line) for line in lines), set(lines)


@pytest.mark.slow
def test_descriptions_of_any_bytes_are_read_safely(tmp_path: Path) -> None:
    """The reader of the metadata alone, without the digest before it, and under the compiler's checks of memory."""
    program = hosts.build("metadata.cpp", tmp_path, "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    deep = b"[" * 100000
    numbers = [b"1e999", b"-1", b"nan", b"0x10", b"1e300", b"4.5", b"null", b'"4"', b"true", b"[]", b"{}", b"\0"]
    whole = json.dumps(DESCRIPTION, indent=1).encode()
    texts = [whole, b"", b"\0", deep, b'{"a":' * 100000, whole + b"\0", whole + b"x", whole + b"\0x"]
    for key in DESCRIPTION:
        start = re.search(rb'"%s": ' % key.encode(), whole).end()
        texts += [re.sub(rb"[^,\n]*", lambda _, n=number: n, whole[start:], count=1) for number in numbers]
        texts[-len(numbers) :] = [whole[:start] + tail for tail in texts[-len(numbers) :]]
    texts += mutations(whole, 300)
    texts += [whole[:length] for length in range(len(whole))]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.bin").write_bytes(text)
    environment = os.environ | {"ASAN_OPTIONS": "detect_leaks=0"}
    ran = subprocess.run(
        [program, tmp_path, str(len(texts))], capture_output=True, text=True, errors="replace", env=environment
    )
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert len(lines) == len(texts)
    assert lines[0] == "cutoff 4 types 3 widths 4 7 double"
    refused = [line.startswith("refused: ") for line in lines]
    assert all(refused[1:8])
    # What is still a description has a sound meaning, whatever the damage: the digest sees that it is another one.
    assert all(re.fullmatch(r"cutoff \S+ types \d+ widths( \d+)* (double|single)|refused: .+", line) for line in lines)
    assert all(refused[-len(whole) :])


def test_files_that_can_not_be_opened(file: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.pt").touch()
    (tmp_path / "half.pt").write_bytes(file.read_bytes()[:-1000])
    torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "plain.pt")
    torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "foreign.pt")
    append_digest(tmp_path / "foreign.pt")
    for name, message in {
        "missing.pt": "does not exist",
        ".": "does not exist or is not a file",
        "empty.pt": "which is empty; copy or export it again",
        "half.pt": "is incomplete, or was not written by this version",
        "plain.pt": "it does not end with a digest",
        "foreign.pt": "another program wrote",
    }.items():
        with pytest.raises(ExportError, match=message):
            eqaccel.load_exported(tmp_path / name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 3}, "has format 3, and this eqaccel reads format 2; install a newer eqaccel"),
        ({"format": 1}, "has format 1, and this eqaccel reads format 2; export the model again"),
        ({"format": "2"}, "another program wrote"),
        ({"kind": "onnx"}, "has kind = 'onnx'"),
        ({"cutoff": "4"}, "has cutoff = '4'"),
        ({"cutoff": float("nan")}, "has cutoff = nan"),
        ({"type_names": []}, r"has type_names = \[\]"),
        ({"dtype": "float16"}, "has dtype = 'float16'"),
        ({"exchange_widths": [-1]}, r"has exchange_widths = \[-1\]"),
        ({"versions": None}, "has versions = None; export the model again"),
        ({"precompiled": None}, "has precompiled = None"),
    ],
)
def test_descriptions_that_make_no_sense(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_model(tmp_path / "model.pt", torch.nn.Identity(), DESCRIPTION | change)
    with pytest.raises(ExportError, match=message):
        eqaccel.load_exported(tmp_path / "model.pt")


@pytest.mark.parametrize("told", [True, False], ids=["told", "hidden"])
def test_machine_code_is_refused_on_request(told: bool, file: Path, tmp_path: Path) -> None:
    """Also where the description does not tell of it; and nothing of the file is loaded before."""
    eqaccel.load_exported(file, allow_native_code=False)
    save_model(tmp_path / "precompiled.pt", Precompiled(), DESCRIPTION | {"precompiled": ["cpu-avx2"] if told else []})
    eqaccel.load_exported(tmp_path / "precompiled.pt")
    with pytest.raises(ExportError, match=r"holds machine code .*pass allow_native_code=True"):
        eqaccel.load_exported(tmp_path / "precompiled.pt", allow_native_code=False)
    save_model(tmp_path / "package.pt2", Precompiled(), DESCRIPTION | {"kind": "aotinductor"})
    with pytest.raises(ExportError, match=r"holds machine code \(an AOTInductor package\)"):
        eqaccel.load_exported(tmp_path / "package.pt2", allow_native_code=False)


def test_autocast_takes_no_digits(tmp_path: Path) -> None:
    loaded = eqaccel.load_exported(save_toy(tmp_path / "toy.pt", dtype="float32"))
    edge_index = torch.combinations(torch.arange(5)).T
    vectors, types = torch.randn(edge_index.shape[1], 3, generator=torch.manual_seed(0)), torch.arange(5) % 3
    expected = loaded(vectors, edge_index, types)
    with torch.autocast("cpu", torch.bfloat16):
        found = loaded(vectors, edge_index, types)
    torch.testing.assert_close(found, expected)


def test_an_operator_that_is_missing_is_named(tmp_path: Path) -> None:
    library = torch.library.Library("eqaccel_test_elsewhere", "DEF")
    library.define("twice(Tensor x) -> Tensor")

    class Calls(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.eqaccel_test_elsewhere.twice(x)

    save_model(tmp_path / "model.pt", Calls(), DESCRIPTION)
    library._destroy()
    with pytest.raises(ExportError, match=r"the operator eqaccel_test_elsewhere::twice, .* import the library that"):
        eqaccel.load_exported(tmp_path / "model.pt")


PACKAGE = Exported(
    lambda *operands: operands[:2], {"kind": "aotinductor", "dtype": "float64", "type_names": ["H", "O"]}
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v, e, t: (v[:, :2], e, t), r"vectors: expected shape \(5, 3\), got \(5, 2\)"),
        (lambda v, e, t: (v.sum(), e, t), r"vectors: expected shape \(0, 3\), got \(\)"),
        (lambda v, e, t: (v.float(), e, t), "vectors: expected torch.float64 on cpu, got torch.float32 on cpu"),
        (lambda v, e, t: (v.to("meta"), e, t), "vectors: expected torch.float64 on cpu, got torch.float64 on meta"),
        (lambda v, e, t: (v, e[:, 1:], t), r"edge_index: expected shape \(2, 5\), got \(2, 4\)"),
        (lambda v, e, t: (v, e.T, t), r"edge_index: expected shape \(2, 5\), got \(5, 2\)"),
        (lambda v, e, t: (v, e.int(), t), "edge_index: expected torch.int64"),
        (lambda v, e, t: (v, e + 1, t), "edge_index: expected entries from 0 to 3, got 4"),
        (lambda v, e, t: (v, e - 1, t), "edge_index: expected entries from 0 to 3, got -1"),
        (lambda v, e, t: (v, e, t[None]), r"types: expected shape \(4,\), got \(1, 4\)"),
        (lambda v, e, t: (v, e, t + 1), "types: expected entries from 0 to 1, got 2"),
        (lambda v, e, t: (v, e, t, 3), "num_local: an AOTInductor package needs all atoms to be local"),
    ],
)
def test_packages_check_their_operands(change: Any, message: str) -> None:
    """Before the compiled code, which does not, sees them."""
    operands = torch.ones(5, 3, dtype=torch.float64), torch.tensor([[0, 1, 2, 3, 0]] * 2), torch.tensor([0, 1, 1, 0])
    with pytest.raises(OperandError, match=message):
        PACKAGE(*change(*operands))
    _, index = PACKAGE(operands[0], torch.stack([operands[1][0]] * 2, 1).T, operands[2])
    assert index.is_contiguous()

"""What the kernels of every family owe: tests of a family say with which specs."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hosts import assemble_hip
from runtime_checks import program, read
from torch import nn

from eqaccel import runtime
from eqaccel.codegen import SCALAR_BYTES, Direction
from eqaccel.errors import CompileError


def assert_rows_stand_alone(run: Callable[[slice], Sequence[torch.Tensor]], rows: int = 200) -> None:
    """Rows of results are the same bit for bit with any number of threads, and in any company.

    Args:
        run: Gives results, row by row, of some rows.
        rows: All of them.
    """
    whole, threads = run(slice(0, rows)), torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for begin, end in ((0, rows), (3, rows * 3 // 4), (17, 18)):
                for part, all_rows in zip(run(slice(begin, end)), whole, strict=True):
                    assert torch.equal(part, all_rows[begin:end])
    finally:
        torch.set_num_threads(threads)


def assert_wrong_kernels_are_refused(
    content: bytes, direction: Direction, change: Callable[[str], str], entry: str = ""
) -> None:
    """CPU kernels of a payload pass the self-check, and do not with a changed body, or a changed entry of that name."""
    entries, body = read(content), entry or f"cpu/{direction.value}"
    for scalar in SCALAR_BYTES:
        runtime.compile_program(program(entries), "cpu", scalar, direction.value)
        wrong = program(entries | {body: change(entries[body])})
        with pytest.raises(CompileError, match="computes wrong results"):
            runtime.compile_program(wrong, "cpu", scalar, direction.value)


def with_another_coefficient(body: str) -> str:
    """The text of a kernel with one added to its last coefficient."""
    last = list(re.finditer(r"T\((-?\d)", body))[-1]
    return body[: last.start()] + "T(1+" + body[last.start(1) :]


def with_another_number(tables: str) -> str:
    """The tables of a kernel with one added to their last number."""
    integers, reals = tables.splitlines()
    *others, last = reals.split()
    return f"{integers}\n{' '.join([*others, repr(float(last) + 1)])}\n"


def cuda_resources(
    content: bytes, directions: Sequence[Direction], arch: str
) -> Iterator[tuple[str, Direction, dict[str, dict[str, Any]]]]:
    """Compiles all CUDA kernels of a payload; yields dtype, direction, and what kernels take, by their names."""
    text = runtime.Program(content)
    for direction in directions:
        for scalar in SCALAR_BYTES:
            compiled = runtime.compile_program(text, "cuda", scalar, direction.value, arch)
            yield scalar, direction, compiled["resources"]


def assert_hip_text_compiles(content: bytes, direction: Direction, folder: Path) -> None:
    """The float32 kernel of a payload compiles for an AMD GPU."""
    assemble_hip(runtime.Program(content).source("hip", "float32", direction.value, "gfx90a"), folder)


def forms(module: nn.Module) -> list[nn.Module]:
    """A copy of a module, one that was scripted, saved and loaded, and one in torch.compile."""
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(module), file)
    file.seek(0)
    return [copy.deepcopy(module), torch.jit.load(file), torch.compile(module, backend="aot_eager")]

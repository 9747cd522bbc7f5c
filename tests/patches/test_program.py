"""eqaccel.patches.program: a potential becomes a program when it is called often, and only if numbers stay the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from eqaccel.errors import ExportError
from eqaccel.patches import program
from eqaccel.patches.program import HostPotential


def _potential(vectors: Tensor, edge_index: Tensor, types: Tensor, num_local: int, exchange: int) -> Any:
    return vectors.sum(1)[:num_local], torch.sin(vectors)


def _results(potential: HostPotential, vectors: Tensor) -> tuple[Tensor, Tensor]:
    return potential(vectors, torch.zeros(2, len(vectors)).long(), torch.zeros(len(vectors)).long(), 3, 0)


def _calls(make: Callable[[], Any], vectors: Tensor, monkeypatch: pytest.MonkeyPatch, count: int = 4) -> HostPotential:
    """A potential after some calls, whose program may be made at the second one."""
    monkeypatch.setattr(program, "WORTH_A_PROGRAM", 2)
    potential = HostPotential(_potential, make)
    expected = _potential(vectors, vectors, vectors, 3, 0)
    for _ in range(count):
        for found, wanted in zip(_results(potential, vectors), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    return potential


@pytest.mark.parametrize("last", [0.5, float("nan")])
def test_a_program_takes_over(last: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """After one comparison, and never again; results that are not finite are compared too."""
    calls: list[str] = []

    def made(*arguments: Any) -> Any:
        calls.append("called")
        return _potential(*arguments)

    def make() -> Any:
        calls.append("made")
        return made

    vectors = torch.randn(5, 3)
    vectors[-1, -1] = last
    assert _calls(make, vectors, monkeypatch, count=1).note == ""
    assert not calls
    assert _calls(make, vectors, monkeypatch).note == "run as a program without Python"
    assert calls == ["made", *["called"] * 3]


def test_other_numbers_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounded(*arguments: Any) -> Any:
        energies, gradient = _potential(*arguments)
        return energies, gradient * (1 + 1e-7)

    potential = _calls(lambda: rounded, torch.randn(5, 3), monkeypatch)
    assert potential.note == "run in Python: its program gives other numbers"


@pytest.mark.parametrize(
    "error",
    [ExportError("layer cannot be scripted\nfor a reason"), RuntimeError(""), torch.jit.Error("a program raises")],
)
def test_why_there_is_no_program(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Any:
        raise error

    potential = _calls(make, torch.randn(5, 3), monkeypatch)
    expected = str(error).splitlines()[0] if str(error) else "RuntimeError"
    assert potential.note == f"run in Python: {expected}"

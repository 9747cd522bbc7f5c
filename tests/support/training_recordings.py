"""Recordings of steps of training on a CPU: what a GPU replays is computed once more, in the same padded memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import eqaccel
from eqaccel.training import Recorder, recorder


class ComputedAgain:
    """Stands in for `Recording`, without a GPU."""

    def __init__(
        self, run: Callable[[bool], Sequence[Tensor]], parameters: Sequence[Tensor], device: torch.device, pool: Any
    ) -> None:
        self._run, self._parameters = run, list(parameters)
        self.wanted: tuple[bool, ...] | None = None
        self._outputs: list[Tensor] | None = None
        self._recorded: list[Tensor] = list(run(True))

    def forward(self) -> list[Tensor]:
        with torch.enable_grad():
            self._outputs = list(self._run(True))
        return [output.detach() for output in self._outputs]

    def backward(self, cotangents: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        assert self._outputs is not None
        if self.wanted is None:  # the gradient is recorded: autograd must still have what that takes
            outputs = [o for o, cotangent in zip(self._recorded, cotangents, strict=True) if cotangent is not None]
            torch.autograd.grad(outputs, self._parameters, list(map(torch.zeros_like, outputs)), allow_unused=True)
            self._recorded = []
        self.wanted = tuple(cotangent is not None for cotangent in cotangents)
        outputs, along = [], []
        for output, cotangent in zip(self._outputs, cotangents, strict=True):
            if cotangent is not None:
                outputs.append(output)
                along.append(torch.zeros_like(output))
                along[-1][: len(cotangent)] = cotangent
        self._outputs = None
        return torch.autograd.grad(outputs, self._parameters, along, allow_unused=True)


def captured(monkeypatch: pytest.MonkeyPatch, model: torch.nn.Module) -> Recorder:
    """Has the steps of a patched model recorded, on a CPU too."""
    if next(model.parameters()).device.type == "cpu":
        monkeypatch.setattr(recorder, "Recording", ComputedAgain)
    made = eqaccel.training.capture(model)
    made.devices = ("cpu", "cuda")
    return made


def same_model(model: torch.nn.Module) -> torch.nn.Module:
    """A copy, which nothing is recorded of."""
    return copy.deepcopy(model)

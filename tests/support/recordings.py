"""Recordings on a CPU that are as stale as those of a GPU: what a step has to notice while it replays them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from eqaccel.step import Evaluation, engine, resident


class FrozenRecording:
    """Stands in for `Capture`: works on the memory of a step, but on the potentials as they were when it was made.

    A GPU reads some changes of weights that the step has yet to notice, and misses others; this one misses them all.
    """

    def __init__(self, body: Callable[[bool], Tensor], device: torch.device) -> None:
        self._step: Any = body.__self__  # type: ignore[attr-defined]
        self._potentials = copy.deepcopy(self._step.potentials)
        self._body = body

    def replay(self) -> Tensor:
        own, self._step.potentials = self._step.potentials, self._potentials
        try:
            with torch.inference_mode(False), torch.no_grad():
                return self._body(False)
        finally:
            self._step.potentials = own


def record_on_cpus(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Has steps on a CPU record too, where tests run on one."""
    if device.type != "cpu":
        return
    plain = Evaluation.__init__

    def recording(self: Evaluation, *arguments: Any, **options: Any) -> None:
        plain(self, *arguments, **options)
        self.not_captured = ""

    monkeypatch.setattr(Evaluation, "__init__", recording)
    monkeypatch.setattr(engine, "Capture", FrozenRecording)
    monkeypatch.setattr(resident, "Capture", FrozenRecording)

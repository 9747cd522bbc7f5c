"""What tuning asks of a family of kernels: problems to time and to compare plans on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eqaccel.codegen import Direction
from eqaccel.families import KernelFamily
from eqaccel.ops import KernelModule


def scalar_name(dtype: torch.dtype) -> str:
    """A dtype as programs call it."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Device:
    """Where kernels are to run.

    Attributes:
        label: What the user calls it.
        backend: "cpu", "cuda" or "hip".
        arch: Architecture of a GPU, None on the CPU.
        number: Number of the GPU, 0 on the CPU; None if only the architecture is known.
    """

    label: str
    backend: str
    arch: str | None
    number: int | None

    @property
    def torch_device(self) -> torch.device:
        """The device as torch calls it."""
        if self.backend == "cpu":
            return torch.device("cpu")
        return torch.device("cuda" if self.number is None else f"cuda:{self.number}")


@dataclass(frozen=True)
class Task(ABC):
    """A kernel whose plan is to be chosen, and how it is used.

    Attributes:
        family: Its family.
        spec: What it computes.
        direction: Which derivative.
        dtype: torch.float32 or torch.float64.
        device: Where; its number is known.
    """

    family: KernelFamily
    spec: Any
    direction: Direction
    dtype: torch.dtype
    device: Device

    @classmethod
    @abstractmethod
    def of(cls, module: KernelModule, direction: Direction, dtype: torch.dtype, device: Device) -> Task:
        """The task of a module's kernel."""

    @property
    def scalar(self) -> str:
        """The dtype as programs call it."""
        return scalar_name(self.dtype)

    @property
    @abstractmethod
    def usage(self) -> str:
        """All but spec, direction and device, in words."""

    @abstractmethod
    def typical_problem(self) -> Any:
        """Made-up operands that fill the device as real ones do."""

    @abstractmethod
    def small_problem(self) -> Any:
        """Made-up operands of few rows, of which NumPy bounds the rounding errors."""

    @abstractmethod
    def call(self, key: int, problem: Any) -> tuple[Tensor, ...]:
        """Runs the operator; its program has been registered under `key`, so that no payload is needed."""

    @abstractmethod
    def scales(self, problem: Any) -> list[Tensor]:
        """For each result the sum over the absolute values of its terms, to which rounding errors are proportional."""

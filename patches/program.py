"""Potentials on CPUs as programs of TorchScript: the same operators in the same order, without the time of Python."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from eqaccel.errors import ExportError
from eqaccel.step import PotentialFunction

WORTH_A_PROGRAM = 50
"""Calls before there is a program: to make one takes a second, and a call gains some milliseconds."""


class HostPotential:
    """A potential on a CPU, which becomes a program when it has been called often.

    The program gives the same numbers, bit by bit, or is not used: it is compared before it takes over. On a GPU there
    is no need of one, because what is recorded there runs without Python.

    Args:
        potential: The potential in Python.
        make: Makes the program; may raise `ExportError`.

    Attributes:
        note: How calls are computed now, for a report; empty as long as there were few.
    """

    def __init__(self, potential: PotentialFunction, make: Callable[[], PotentialFunction]) -> None:
        self.note = ""
        self._potential, self._make = potential, make
        self._calls = 0

    def __call__(
        self, vectors: Tensor, edge_index: Tensor, types: Tensor, num_local: int, exchange: int
    ) -> tuple[Tensor, Tensor]:
        """See `Potential.forward`."""
        arguments = vectors, edge_index, types, num_local, exchange
        with torch.jit.optimized_execution(False):  # optimized, programs add up gradients in another order
            results = self._potential(*arguments)
            self._calls += 1
            if self._calls == WORTH_A_PROGRAM:
                try:
                    self._potential = self._program(arguments, results)
                    self.note = "run as a program without Python"
                except (ExportError, NotImplementedError, RuntimeError, torch.jit.Error) as error:
                    self.note = f"run in Python: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
        return results

    def _program(
        self, arguments: tuple[Tensor, Tensor, Tensor, int, int], expected: tuple[Tensor, Tensor]
    ) -> PotentialFunction:
        """The program; raises `ExportError` if it does not give the very same numbers."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is traced warns of sizes that are constants
            program = self._make()
        for found, wanted in zip(program(*arguments), expected, strict=True):
            if not torch.allclose(found, wanted, rtol=0.0, atol=0.0, equal_nan=True):
                raise ExportError("its program gives other numbers")
        return program

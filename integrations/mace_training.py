"""MACE's training program on a patched model: `eqaccel mace_run_train`, with the options of `mace_run_train`.

MACE's program offers no place for extensions, so two functions that it calls are exchanged while it runs: the one that
it asks for the parameters to optimise, when the model is complete and on its device, and the one that copies a model
before it is written. What is trained is patched, and what is written is not: files and checkpoints are those of MACE.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any
from unittest import mock

from torch import nn

import eqaccel
from eqaccel.errors import PatchError

PROGRAM = "mace_run_train"
CAPTURE = "--eqaccel_capture"
PARAMETERS, COPY = "get_params_options", "deepcopy"
"""What MACE's program calls these two functions."""


def run(arguments: Sequence[str]) -> None:
    """Runs MACE's training program, in this process, on a patched model.

    Args:
        arguments: The options of `mace_run_train`, and `--eqaccel_capture`, which records steps as CUDA graphs. A
            distributed run starts this on every rank, as MACE's own program.

    Raises:
        PatchError: If mace-torch is missing or is a version that this does not fit; if the model cannot be patched,
            as with `--enable_cueq` or `--enable_oeq`. Nothing has been trained then.
        VerificationError: If the patched model does not reproduce the original.
        SystemExit: From MACE's own reading of the options.
    """
    program = _program()
    own = [argument for argument in arguments if argument != CAPTURE]
    with mock.patch.object(sys, "argv", [PROGRAM, *own]), patched(program, CAPTURE in arguments):
        program.main()


@contextlib.contextmanager
def patched(program: ModuleType, capture: bool = False) -> Iterator[None]:
    """Models that MACE's program trains are patched, and those that it writes are not.

    Args:
        program: The module `mace.cli.run_train`.
        capture: Whether steps are recorded, see `eqaccel.training.capture`; the log says in the end what was.
    """
    parameters: Callable[..., Any] = getattr(program, PARAMETERS)
    recorders = []

    def parameters_of_patched(settings: Any, model: nn.Module) -> Any:
        report = eqaccel.report(eqaccel.patch(model))
        logging.info("%d modules run on kernels of eqaccel", report.accelerated)
        if capture:
            recorders.append(eqaccel.training.capture(model))
        return parameters(settings, model)

    with mock.patch.object(program, PARAMETERS, parameters_of_patched), mock.patch.object(program, COPY, plain_copy):
        yield
    for recorder in recorders:
        logging.info("recorded steps of training: %s", recorder)


def plain_copy(original: Any) -> Any:
    """A copy in which no model is patched."""
    duplicate = copy.deepcopy(original)
    return eqaccel.unpatch(duplicate) if isinstance(duplicate, nn.Module) else duplicate


def _program() -> ModuleType:
    try:
        from mace.cli import run_train
    except ImportError as error:
        raise PatchError(f"{PROGRAM}: expected mace-torch to be installed, got '{error}'") from error
    missing = [name for name in ("main", PARAMETERS, COPY) if not hasattr(run_train, name)]
    if missing:
        raise PatchError(
            f"{PROGRAM}: expected {', '.join(missing)} in mace.cli.run_train, got a version of MACE without: call "
            "eqaccel.patch(model) in a training script of your own"
        )
    return run_train

"""Finds and loads libeqaccel_ops, the C++ library that registers the operators with torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from eqaccel import runtime
from eqaccel.errors import CompileError, GraphError, MissingCompilerError, OperandError, SettingsError
from eqaccel.families.tensor_product import third_payload_of


@functools.lru_cache(maxsize=1)
def library_path() -> Path:
    """The operator library, which a program without Python loads before a scripted or exported model.

    Returns:
        Absolute path of the libeqaccel_ops for this torch.

    Raises:
        ImportError: If the package holds none for this torch, or was not built.
    """
    return runtime.torch_libraries(torch.__version__) / "libeqaccel_ops.so"


@functools.lru_cache(maxsize=1)
def load_library() -> None:
    """Registers `torch.ops.eqaccel.*` with torch, once a process, and what makes kernels of third derivatives for them.

    Raises:
        ImportError: If there is no library for this torch, or it does not load.
    """
    try:
        torch.ops.load_library(str(library_path()))
    except OSError as error:
        raise ImportError(
            f"{library_path()} does not load with torch {torch.__version__}: {error}. Build eqaccel again with this "
            "torch: pip install --no-build-isolation ."
        ) from error
    runtime.set_third_maker(third_payload_of)


def is_traced() -> bool:
    """Whether what runs is recorded for a program, by torch.compile, torch.export, make_fx or torch.jit.trace."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack() > 0


def call_operator(operator: Callable[..., Any], *arguments: object) -> Any:
    """Calls an operator in eager mode; its complaints, which are written once, in C++, become errors of eqaccel.

    Args:
        operator: One of `torch.ops.eqaccel`.
        *arguments: What it takes.

    Raises:
        EqaccelError: As `translate` says.
    """
    if torch.compiler.is_compiling():
        return operator(*arguments)
    try:
        return operator(*arguments)
    except RuntimeError as error:
        raise translate(error) from None


def translate(error: Exception) -> Exception:
    """The eqaccel error that an operator meant; torch makes every C++ error a RuntimeError or IndexError.

    Args:
        error: What the call of an operator raised.

    Returns:
        A GraphError, OperandError, SettingsError, CompileError or MissingCompilerError; or `error` itself if it is none
        of ours.
    """
    prefix, colon, text = str(error).partition(": ")
    if prefix == "eqaccel::SettingsError":
        return SettingsError(text)
    if prefix == "eqaccel::graph":
        return GraphError(str(error))
    for kind in (CompileError, MissingCompilerError):
        if prefix == f"eqaccel::{kind.__name__}":
            message, _, log = text.partition("\nCompiler output:\n")
            return kind(message, log)
    if colon and prefix.startswith("eqaccel::"):
        return OperandError(str(error))
    return error

"""Opening the models that are to be exported, from the files that torch and the kinds of model write."""

from __future__ import annotations

import os
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
from eqaccel.patches.finder import KINDS
from torch import nn

from eqaccel.errors import ExportError


def open_model(path: str | os.PathLike[str]) -> nn.Module:
    """Opens a file that holds a whole model; opening runs code of the file, so trust its source.

    Args:
        path: What `torch.save(model, path)` wrote, as MACE does, or a package (".nequip.zip") or checkpoint (".ckpt")
            of NequIP.

    Raises:
        ExportError: If the file holds no model, or one that does not open here.
    """
    file = Path(path)
    formats = ", or ".join(["of torch.save", *(kind.file_format.name for kind in KINDS if kind.file_format)])
    expected = f"model: expected a file with a whole model ({formats})"
    if not file.is_file():
        raise ExportError(f"{expected}, got '{file}': No such file")
    if file.stat().st_size == 0:
        raise ExportError(f"{expected}, got '{file}', which is empty; copy or save it again")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is no model is told below
            model = _load_any(file)
    except Exception as error:  # the file says what runs, and so what can be raised
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ExportError(f"{expected}, got '{file}', which does not open ({reason}); {_cure(error)}") from error
    if isinstance(model, torch.jit.ScriptModule):
        raise ExportError(f"{expected}, got '{file}', a TorchScript model; give the file that it was made from")
    if not isinstance(model, nn.Module):
        raise ExportError(f"{expected}, got '{file}', which holds a {type(model).__name__}; save the model itself")
    return model


def _load_any(file: Path) -> Any:
    formats = [kind.file_format for kind in KINDS if kind.file_format is not None]
    load = next((known.load for known in formats if known.matches(file)), _load)
    return load(file)


def _load(file: Path) -> Any:
    return torch.load(file, map_location="cpu", weights_only=False)


def _cure(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"install {(error.name or 'the library that made the model').partition('.')[0]} beside eqaccel"
    if isinstance(error, (EOFError, zipfile.BadZipFile)) or "central directory" in str(error):
        return "it is incomplete: copy it again"
    return "use an environment with the version of the library that made the model"

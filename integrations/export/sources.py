"""Opening the models that are to be exported, from the files that MACE, NequIP and torch write."""

from __future__ import annotations

import importlib
import os
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eqaccel.errors import ExportError

_NEQUIP_LOADER = "nequip.model.saved_models"
"""Module of nequip that opens packages and checkpoints; imported when there is one to open."""


def open_model(path: str | os.PathLike[str]) -> nn.Module:
    """Opens a file that holds a whole model; opening runs code of the file, so trust its source.

    Args:
        path: What `torch.save(model, path)` wrote, as MACE does, or a package (".nequip.zip") or checkpoint (".ckpt")
            of NequIP.

    Raises:
        ExportError: If the file holds no model, or one that does not open here.
    """
    file = Path(path)
    expected = "model: expected a file with a whole model (of torch.save, or a package or checkpoint of NequIP)"
    if not file.is_file():
        raise ExportError(f"{expected}, got '{file}': No such file")
    if file.stat().st_size == 0:
        raise ExportError(f"{expected}, got '{file}', which is empty; copy or save it again")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is no model is told below
            model = _load_nequip(file) if _is_of_nequip(file) else _load(file)
    except Exception as error:  # the file says what runs, and so what can be raised
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ExportError(f"{expected}, got '{file}', which does not open ({reason}); {_cure(error)}") from error
    if isinstance(model, torch.jit.ScriptModule):
        raise ExportError(f"{expected}, got '{file}', a TorchScript model; give the file that it was made from")
    if not isinstance(model, nn.Module):
        raise ExportError(f"{expected}, got '{file}', which holds a {type(model).__name__}; save the model itself")
    return model


def _is_of_nequip(file: Path) -> bool:
    """Whether a file is one of torch.package, in which nequip-package writes, or named as a checkpoint."""
    if file.suffix == ".ckpt":
        return True
    if not zipfile.is_zipfile(file):
        return False
    with zipfile.ZipFile(file) as archive:
        return any(name.endswith(".data/extern_modules") for name in archive.namelist())


def _load_nequip(file: Path) -> Any:
    if file.suffix != ".ckpt" and not file.name.endswith(".nequip.zip"):
        raise ValueError("a package of NequIP has to be named *.nequip.zip")
    return importlib.import_module(_NEQUIP_LOADER).load_saved_model(file)


def _load(file: Path) -> Any:
    return torch.load(file, map_location="cpu", weights_only=False)


def _cure(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"install {(error.name or 'the library that made the model').partition('.')[0]} beside eqaccel"
    if isinstance(error, (EOFError, zipfile.BadZipFile)) or "central directory" in str(error):
        return "it is incomplete: copy it again"
    return "use an environment with the version of the library that made the model"

"""What a user hands over as a model, and wants of it: files that torch and the kinds of model write, objects, names."""

from __future__ import annotations

import os
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eqaccel.errors import ExportError
from eqaccel.o3.origins import package_of
from eqaccel.patches.calculator import library_class, overridden
from eqaccel.patches.finder import KINDS, find_models
from eqaccel.patches.kind import Exporting, FileFormat, ModelKind
from eqaccel.prepare import combined_calculators

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def open_model(path: str | os.PathLike[str]) -> nn.Module:
    """Opens a file that holds a whole model; opening runs code of the file, so trust its source.

    Args:
        path: What `torch.save(model, path)` wrote, as MACE does, or a package (".nequip.zip") or checkpoint (".ckpt")
            of NequIP, or a checkpoint (".pth") of SevenNet. Where there is no such file, the name of a model that
            SevenNet brings or downloads ("7net-l3i5").

    Raises:
        ExportError: If the file holds no model, or one that does not open here.
    """
    file = Path(path)
    formats = ", or ".join(["of torch.save", *(known.name for known in _formats())])
    expected = f"model: expected a file with a whole model ({formats})"
    if not file.is_file():
        file = _pretrained(str(file), expected)
    if file.stat().st_size == 0:
        raise ExportError(f"{expected}, got '{file}', which is empty; copy or save it again")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is no model is told below
            model = _load_any(file)
    except Exception as error:  # the file says what runs, and so what can be raised
        raise ExportError(
            f"{expected}, got '{file}', which does not open ({_reason(error)}); {_cure(error)}"
        ) from error
    if isinstance(model, torch.jit.ScriptModule):
        raise ExportError(f"{expected}, got '{file}', a TorchScript model; give the file that it was made from")
    if not isinstance(model, nn.Module):
        raise ExportError(f"{expected}, got '{file}', which holds a {type(model).__name__}; save the model itself")
    return model


def _formats() -> list[FileFormat]:
    return [kind.file_format for kind in KINDS if kind.file_format is not None]


def _pretrained(name: str, expected: str) -> Path:
    """The file that a library has under a name; raises `ExportError` if there is none, or it cannot be had."""
    try:
        found = next(filter(None, (known.pretrained(name) for known in _formats())), None)
    except Exception as error:  # a library that is missing, a download that fails
        cure = _cure(error) if isinstance(error, ModuleNotFoundError) else "give the path of a file"
        raise ExportError(
            f"{expected}, got '{name}', a name whose file cannot be had ({_reason(error)}); {cure}"
        ) from error
    if found is None:
        raise ExportError(f"{expected}, got '{name}': No such file")
    return found


def _load_any(file: Path) -> Any:
    load = next((known.load for known in _formats() if known.matches(file)), _load)
    return load(file)


def _load(file: Path) -> Any:
    return torch.load(file, map_location="cpu", weights_only=False)


def _reason(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _cure(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"install {(error.name or 'the library that made the model').partition('.')[0]} beside eqaccel"
    if isinstance(error, (EOFError, zipfile.BadZipFile)) or "central directory" in str(error):
        return "it is incomplete: copy it again"
    return "use an environment with the version of the library that made the model"


def single_model(target: Any) -> tuple[nn.Module, ModelKind, Exporting]:
    """The one model in what a user handed over, which has to be of a kind that can be exported.

    Raises:
        ExportError: If there are several, or something besides the model, or it is of an unknown kind.
    """
    models = find_models(target, ExportError)
    if len(models) > 1:
        raise ExportError(
            f"model: expected one model, got {len(models)} in {type(target).__name__} "
            f"({', '.join(found.path for found in models)}); take one after the other"
        )
    (found,) = models
    if isinstance(found.model, torch.jit.ScriptModule):
        raise ExportError("model: expected the Python model, got a scripted one; take what it was made from")
    exporting = None if found.kind is None else found.kind.exporting
    if not isinstance(found.kind, ModelKind) or exporting is None or not exporting.accepts(found.model):
        known = ", ".join(kind.name.lower() for kind in KINDS if kind.exporting is not None)
        raise ExportError(
            f"model: expected a model of a kind that can be exported ({known}), got {type(found.model).__name__}; if "
            "it holds such a model, as calculators do, pass the model inside"
        )
    reason = next(filter(None, map(_addition, [*_outside(target), *found.holders])), None)
    if reason is not None:
        raise ExportError(
            f"model: expected a model, or what holds one and adds nothing to it, but {reason}; pass the model inside "
            f"({found.path})"
        )
    return found.model, found.kind, exporting


def _outside(target: Any) -> list[Any]:
    """What holds a single module and is none itself: lists, and a calculator in them."""
    outside = []
    while isinstance(target, (list, tuple)):
        outside.append(target)
        target = target[0]
    return outside if isinstance(target, nn.Module) else [*outside, target]


def _addition(holder: Any) -> str | None:
    """Why what holds a model may give other results than the model; None if it does not."""
    if isinstance(holder, nn.Module):
        computes = type(holder).forward is not nn.Module.forward
        return f"{type(holder).__name__} has a forward method of its own" if computes else None
    if combined_calculators(holder):
        return f"{type(holder).__name__} combines calculators"
    known = (kind.stepping for kind in KINDS if kind.stepping is not None)
    stepping = next((stepping for stepping in known if library_class(holder, stepping)), None)
    if stepping is not None and (changed := overridden(holder, stepping, ("calculate",))):
        return changed
    if stepping is None and hasattr(holder, "calculate") and package_of(type(holder)) != "eqaccel":
        return f"{type(holder).__name__} has a calculate method of its own"
    units = [name for name in ("energy_units_to_eV", "length_units_to_A") if getattr(holder, name, 1.0) != 1.0]
    return f"{type(holder).__name__} converts units ({', '.join(units)})" if units else None


def chosen_head(heads: Sequence[str], head: str | None) -> int:
    """The number of a head; raises `ExportError` if there is none of that name, or several and none is named."""
    if head not in heads and (head is not None or len(heads) > 1):
        raise ExportError(f"head: expected one of {', '.join(map(repr, heads))}, got {head!r}")
    return 0 if head is None else heads.index(head)


def chosen_dtype(dtype: torch.dtype | str | None, own: torch.dtype) -> torch.dtype:
    """The dtype of a name, or a model's own; raises `ExportError` if it is neither float32 nor float64."""
    found = own if dtype is None else DTYPES.get(str(dtype).removeprefix("torch."))
    if found is None or found not in DTYPES.values():
        got = f"a model in {found}" if dtype is None else repr(dtype)
        raise ExportError(f"dtype: expected torch.float32 or torch.float64, got {got}")
    return found

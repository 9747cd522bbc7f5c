"""Opening exported files in Python, and saying clearly why one cannot be opened."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from eqaccel.integrations.export.aot import SMALLEST
from torch import Tensor

import eqaccel.ops  # noqa: F401 (registers the operators that files are made of)
from eqaccel.errors import ExportError, OperandError

FORMAT = 1
"""Version of the contract between a file and the program that opens it: metadata, arguments and results."""

METADATA = "eqaccel.json"
"""Name of the metadata among the extra files of a TorchScript file."""


PACKAGE_KEY = "eqaccel"
"""Key of the metadata, as JSON text, in the metadata of an AOTInductor package."""


@dataclass(frozen=True)
class Exported:
    """An exported file, opened.

    Attributes:
        module: The TorchScript module, `Potential.forward` says what it takes and returns; or an AOTInductor package,
            which takes vectors, edge_index and types only.
        metadata: The description that the file holds of itself.
    """

    module: Callable[..., tuple[Tensor, Tensor]]
    metadata: Mapping[str, Any]

    def __call__(
        self, vectors: Tensor, edge_index: Tensor, types: Tensor, num_local: int | None = None, exchange: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Calls the module; see `Potential.forward`. By default all nodes are local.

        Raises:
            OperandError: If an operand does not fit an AOTInductor package (TorchScript: torch.jit.Error).
        """
        num_local = types.size(0) if num_local is None else num_local
        if self.metadata["kind"] == "torchscript":
            return self.module(vectors, edge_index, types, num_local, exchange)
        if num_local != types.size(0) or min(num_local, vectors.size(0)) < SMALLEST:
            raise OperandError(
                f"num_local: an AOTInductor package needs all atoms to be local, and {SMALLEST} atoms and edges at "
                f"least, got {types.size(0)} atoms, {num_local} of them local, and {vectors.size(0)} edges; export in "
                "format 'torchscript'"
            )
        expected = {"vectors": getattr(torch, self.metadata["dtype"]), "edge_index": torch.int64, "types": torch.int64}
        for (name, dtype), tensor in zip(expected.items(), (vectors, edge_index, types), strict=True):
            if tensor.dtype != dtype:  # a package reads memory as if it were of the right type
                raise OperandError(f"{name}: expected {dtype}, got {tensor.dtype}; convert it with .to()")
        return tuple(self.module(vectors, edge_index, types))


def load_exported(path: str | os.PathLike[str], device: torch.device | str | None = None) -> Exported:
    """Opens a file that `export` wrote.

    Args:
        path: The file.
        device: Where to put it; default: the device that it was exported for.

    Raises:
        ExportError: If there is no such file, or it is truncated, of another program, or of a newer eqaccel; or if it
            is for a GPU and torch finds none.
    """
    file = Path(path)
    metadata = read_metadata(file)
    place = parse_device(metadata["device"] if device is None else device)
    if metadata["kind"] == "aotinductor" and place.type != "cpu":
        raise ExportError(f"device: expected 'cpu' for the AOTInductor package '{file}', got '{place}'")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ExportError(
            f"device: '{file}' is to run on a GPU, and torch finds none on this machine; pass device='cpu', or export "
            "it again with that"
        )
    try:
        if metadata["kind"] == "torchscript":
            module = torch.jit.load(str(file), map_location=place)
        else:
            module = torch._inductor.aoti_load_package(str(file))
    except RuntimeError as error:
        raise ExportError(
            f"path: '{file}' cannot be opened by torch {torch.__version__} (it was written by torch "
            f"{metadata['versions']['torch']}): {error}. Export the model again with this version of torch"
        ) from error
    return Exported(module, {**metadata, "device": place.type})


def _find_metadata(archive: zipfile.ZipFile) -> Any:
    for name in archive.namelist():
        if name.endswith(f"/extra/{METADATA}"):
            return json.loads(archive.read(name))
        if name.endswith("wrapper_metadata.json"):
            return json.loads(json.loads(archive.read(name)).get(PACKAGE_KEY, "null"))
    return None


def parse_device(device: torch.device | str) -> torch.device:
    """The device of a name; raises `ExportError` if it is neither a CPU nor a GPU."""
    try:
        found = torch.device(device)
    except RuntimeError:
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise ExportError(f"device: expected 'cpu' or 'cuda', got {str(device)!r}")
    return found


def read_metadata(file: Path) -> dict[str, Any]:
    """Reads the metadata of an exported file without loading the model; raises as `load_exported`."""
    expected = "expected a file written by eqaccel.export"
    if not file.is_file():
        raise ExportError(f"path: {expected}, got '{file}', which does not exist or is not a file")
    try:
        with zipfile.ZipFile(file) as archive:
            metadata = _find_metadata(archive)
    except (zipfile.BadZipFile, ValueError) as error:
        raise ExportError(
            f"path: {expected}, got '{file}', which is truncated or no such file ({error}); copy or export it again"
        ) from error
    if not isinstance(metadata, dict) or not isinstance(metadata.get("format"), int):
        raise ExportError(
            f"path: {expected}, got '{file}', which another program wrote; export the model with eqaccel.export"
        )
    if metadata["format"] > FORMAT:
        raise ExportError(
            f"path: '{file}' has format {metadata['format']}, and this eqaccel reads formats up to {FORMAT}; install a "
            f"newer eqaccel (the file was written by {metadata.get('versions', {}).get('eqaccel', 'a newer one')})"
        )
    return metadata

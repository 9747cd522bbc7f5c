"""Opening exported files in Python, and saying clearly why one cannot be opened."""

from __future__ import annotations

import json
import math
import os
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

import eqaccel.ops  # noqa: F401 (registers the operators that files are made of)
from eqaccel.errors import ExportError, OperandError
from eqaccel.integrations.export.aot import SMALLEST
from eqaccel.integrations.export.digest import check_digest

FORMAT = 2
"""Version of the contract between a file and the program that opens it: metadata, arguments and results."""

METADATA = "eqaccel.json"
"""Name of the metadata among the extra files of a TorchScript file."""

PACKAGE_KEY = "eqaccel"
"""Key of the metadata, as JSON text, in the metadata of an AOTInductor package."""

_PRECOMPILED_KERNEL = re.compile(rb"\nbinary/[\w-]+/[\w-]+/[\w-]+ ")
"""How a kernel in machine code starts within a payload; csrc/model/file.cpp knows it too."""


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

        It computes in its own dtype, also where autocast is on, and gives the same bits in every call.

        Raises:
            OperandError: If an operand does not fit an AOTInductor package (TorchScript: torch.jit.Error).
        """
        if self.metadata["kind"] == "torchscript":
            num_local = types.size(0) if num_local is None else num_local
            # Optimized, programs of TorchScript add up gradients in another order from their second or third call on.
            with torch.autocast(self.metadata["device"], enabled=False), torch.jit.optimized_execution(False):
                return self.module(vectors, edge_index, types, num_local, exchange)
        self._check_package_operands(vectors, edge_index, types, num_local)
        energies, gradient = self.module(vectors.contiguous(), edge_index.contiguous(), types.contiguous())
        return energies, gradient

    def _check_package_operands(
        self, vectors: Tensor, edge_index: Tensor, types: Tensor, num_local: int | None
    ) -> None:
        """Raises `OperandError` unless all fits: a package reads and writes memory without a look at what it is."""
        num_nodes, num_edges = types.numel(), vectors.shape[0] if vectors.dim() else 0
        dtype = getattr(torch, self.metadata["dtype"])
        operands = {"vectors": (vectors, dtype), "edge_index": (edge_index, torch.int64), "types": (types, torch.int64)}
        shapes = {"vectors": (num_edges, 3), "edge_index": (2, num_edges), "types": (num_nodes,)}
        for name, (tensor, wanted) in operands.items():
            if tensor.dtype != wanted or tensor.device.type != "cpu":
                raise OperandError(
                    f"{name}: expected {wanted} on cpu, got {tensor.dtype} on {tensor.device}; convert it with .to()"
                )
            if tensor.shape != shapes[name]:
                raise OperandError(f"{name}: expected shape {shapes[name]}, got {tuple(tensor.shape)}")
        local = num_nodes if num_local is None else num_local
        if local != num_nodes or min(local, num_edges) < SMALLEST:
            raise OperandError(
                f"num_local: an AOTInductor package needs all atoms to be local, and {SMALLEST} atoms and edges at "
                f"least, got {num_nodes} atoms, {local} of them local, and {num_edges} edges; export in format "
                "'torchscript'"
            )
        for name, tensor, limit in (
            ("edge_index", edge_index, num_nodes),
            ("types", types, len(self.metadata["type_names"])),
        ):
            low, high = (int(value) for value in torch.aminmax(tensor))
            if low < 0 or high >= limit:
                raise OperandError(f"{name}: expected entries from 0 to {limit - 1}, got {low if low < 0 else high}")


@torch.inference_mode(False)  # tensors made inside of it could never take part in gradients
def load_exported(
    path: str | os.PathLike[str], device: torch.device | str | None = None, *, allow_native_code: bool = True
) -> Exported:
    """Opens a file that `export` wrote, if it is as it was written.

    A file is a program. It holds the source text of its kernels, which this machine compiles; precompiled ones and
    AOTInductor packages are machine code. So open files from people whom you trust.

    Args:
        path: The file.
        device: Where to put it; default: the device that it was exported for.
        allow_native_code: Whether to open files that hold machine code. False refuses them before anything of them is
            loaded, so that all kernels are compiled here; it is no defence against a file that is made to deceive.

    Raises:
        ExportError: If there is no such file, or it is incomplete, damaged, of another program or of another version of
            the format; if it holds machine code that is not allowed; or if it is for a GPU and torch finds none.
    """
    file = Path(path)
    metadata = read_metadata(file)
    if not allow_native_code and (metadata["kind"] == "aotinductor" or metadata["precompiled"] or _holds_kernels(file)):
        raise ExportError(
            f"path: '{file}' holds machine code ({_native_parts(metadata)}), which is not allowed here; pass "
            "allow_native_code=True if you trust its source, or export the model as TorchScript without precompile"
        )
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
        raise ExportError(_not_opened(file, metadata["versions"], str(error))) from error
    return Exported(module, {**metadata, "device": place.type})


def _not_opened(file: Path, versions: Mapping[str, str], reason: str) -> str:
    """What to say of a file that torch refuses: the versions tell which of the two has to change."""
    unknown = re.search(r"Unknown builtin op: (\w+)::(\w+)", reason)
    if unknown is None:
        return (
            f"path: '{file}' cannot be opened by torch {torch.__version__} (it was written by torch "
            f"{versions['torch']}): {reason}. Export the model again with this version of torch"
        )
    library, operator = unknown.groups()
    if library == "eqaccel":
        cure = f"install eqaccel {versions['eqaccel']}, which wrote the file, or export the model again with this one"
    elif library == "aten":
        cure = f"install torch {versions['torch']}, which wrote the file, or export the model again with this one"
    else:
        cure = f"import the library that defines {library}'s operators first, in this program too"
    return f"path: '{file}' needs the operator {library}::{operator}, which is not there; {cure}"


def _holds_kernels(file: Path) -> bool:
    return _PRECOMPILED_KERNEL.search(file.read_bytes()) is not None


def _native_parts(metadata: Mapping[str, Any]) -> str:
    if metadata["kind"] == "aotinductor":
        return "an AOTInductor package"
    return f"kernels precompiled for {', '.join(metadata['precompiled']) or 'targets that it does not name'}"


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
    check_digest(file)
    try:
        with zipfile.ZipFile(file) as archive:
            metadata = _find_metadata(archive)
    except (zipfile.BadZipFile, ValueError, AttributeError, RecursionError) as error:
        raise ExportError(f"path: {expected}, got '{file}', whose description cannot be read ({error})") from error
    if not isinstance(metadata, dict) or not isinstance(metadata.get("format"), int):
        raise ExportError(
            f"path: {expected}, got '{file}', which another program wrote; export the model with eqaccel.export"
        )
    if metadata["format"] != FORMAT:
        newer = metadata["format"] > FORMAT
        raise ExportError(
            f"path: '{file}' has format {metadata['format']}, and this eqaccel reads format {FORMAT}; "
            + ("install a newer eqaccel, or export the model with this one" if newer else "export the model again")
        )
    for key, is_valid in _KEYS.items():
        if not is_valid(metadata.get(key)):
            raise ExportError(
                f"path: {expected}, got '{file}', whose description has {key} = {metadata.get(key)!r}; export the "
                "model again"
            )
    return metadata


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, int) and item > 0 for item in value)


_KEYS: Mapping[str, Callable[[Any], bool]] = MappingProxyType(
    {
        "kind": lambda value: value in ("torchscript", "aotinductor"),
        "cutoff": lambda value: isinstance(value, float) and 0 < value < math.inf,
        "type_names": lambda value: _are_texts(value) and len(value) > 0,
        "dtype": lambda value: value in ("float32", "float64"),
        "device": lambda value: value in ("cpu", "cuda"),
        "units": lambda value: value == {"energy": "eV", "length": "angstrom"},
        "exchange_widths": _are_counts,
        "precompiled": _are_texts,
        "versions": lambda value: isinstance(value, dict) and {"eqaccel", "torch"} <= value.keys(),
    }
)
"""What the metadata must hold for a file to be opened."""

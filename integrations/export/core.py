"""The mechanics of exporting: checking the arguments, copying, scripting, writing the file and comparing it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import eqaccel
from eqaccel.errors import ExportError
from eqaccel.integrations.export.aot import compile_package
from eqaccel.integrations.export.digest import append_digest
from eqaccel.integrations.export.loading import FORMAT, METADATA, PACKAGE_KEY, Exported, load_exported, parse_device
from eqaccel.integrations.export.precompiled import add_entries, check_targets, precompiled_entries
from eqaccel.integrations.export.sources import DTYPES, chosen_dtype, chosen_head, single_model
from eqaccel.ops import KernelModule, NeighborKernels
from eqaccel.patches.agreement import difference, edges_of
from eqaccel.patches.copying import duplicated
from eqaccel.patches.potential import Convolution, Potential
from eqaccel.patches.precision import precision_of
from eqaccel.patches.rounding import ROUNDING
from eqaccel.patches.scripting import script
from eqaccel.patches.snapshot import hooked_part
from eqaccel.patches.structures import Structure, small_structures
from eqaccel.patches.torch_state import default_dtype, frozen, model_device
from eqaccel.prepare import scalar_name


@torch.inference_mode(False)  # the model is run with gradients, whatever the caller's mode is
@torch.enable_grad()
def export(
    model: Any,
    path: str | os.PathLike[str],
    format: str = "torchscript",
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    head: str | None = None,
    precompile: Sequence[str] = (),
    verify: bool = True,
) -> dict[str, Any]:
    """Writes a patched model to a file that a C++ program, LAMMPS for one, runs without Python.

    The model itself is not changed. What the module in the file takes and returns is described at `Potential.forward`;
    a program opens it with `torch::jit::load` after it has loaded the operator library (`python -m eqaccel libs`).
    An AOTInductor package, which holds code compiled for machines like this one, takes (vectors, edge_index, types):
    it knows no ghosts, and needs two atoms and two edges at least.

    A file is a program: it holds the source text of its kernels, and precompiled kernels and packages are machine code.
    Who opens it runs it, and can refuse machine code (`load_exported(path, allow_native_code=False)`, in LAMMPS
    `native_code no`). It ends with a digest, and one that was damaged on its way is not run.

    Args:
        model: A model that `eqaccel.patch` has accelerated; or an ASE calculator, list or container that holds one and
            adds nothing to what it computes.
        path: The file to write; replaced only when everything has succeeded.
        format: "torchscript", or "aotinductor" for a package (".pt2", CPU only, compiles for a minute or more).
        device: Where the tensors in the file are, "cpu" or "cuda"; default: where the model is.
        dtype: torch.float32 or torch.float64; default: that of the model.
        head: Name of the head to export, needed if the model has several.
        precompile: Targets to compile the kernels for now, so that they need no compiler later: "cpu-avx512",
            "cpu-avx2", "sm_80", "sm_90", ... None of them has to be present here.
        verify: Whether to open the file and compare energies and forces with the model, on two generated structures. A
            model with hooks is refused without, since the file may be without them.

    Returns:
        The metadata of the file.

    Raises:
        ExportError: If an argument makes no sense, if there are several models or something besides the model, if it is
            not patched or of an unknown kind, if a module of it cannot be scripted or a kernel not be precompiled, or
            if the file does not reproduce the model. No file is left behind then.
    """
    target = _checked_path(path)
    _check_format(format, target)
    check_targets(precompile)
    model, kind, exporting = single_model(model)
    exporting.check(model)
    hooked = hooked_part(model)
    if hooked and not verify:
        raise ExportError(
            f"model: {hooked} has hooks, which the file may be without; take them away, or leave out verify=False: the "
            "comparison sees whether they matter"
        )
    index = chosen_head(exporting.heads(model), head)
    scalar_type = chosen_dtype(dtype, kind.dtype(model))
    place = _checked_device(device, model)
    if format == "aotinductor" and place.type != "cpu":
        raise ExportError(f"device: expected 'cpu' for format 'aotinductor', got '{place}'; pass device='cpu'")

    duplicate = frozen(exporting.move(duplicated(model), place, scalar_type)).eval()
    cutoff, num_elements = kind.extent(duplicate)
    description = {
        "family": kind.name.lower(),
        "head": exporting.heads(model)[index],
        "cutoff": cutoff,
        "type_names": exporting.type_names(duplicate),
    }
    if scalar_type == torch.float32 and precision_of(model):
        description["low_precision"] = list(precision_of(model))
    with default_dtype(scalar_type):
        structures = small_structures(cutoff, num_elements) if verify else []
        with torch.jit.optimized_execution(False):
            expected = [kind.evaluate(duplicate, structure, index) for structure in structures]
        # Of the model, not of its copy, which may be in a smaller dtype.
        constants = exporting.constants(model, index).to(place, torch.float64, copy=True)
        potential = exporting.potential(duplicate, index, constants)
        potential.make_scriptable()
        if format == "torchscript":
            potential.search = NeighborKernels().to(place)
        scalar = scalar_name(scalar_type)
        for module in potential.modules():
            if precompile and isinstance(module, KernelModule):
                what = (module.family, module.spec, scalar, tuple(precompile), module.tuned)
                add_entries(module, precompiled_entries(*what))
        metadata = _metadata(description, potential, scalar_type, place, precompile)
        scripted = script(potential)
    with _temporary(target) as file:
        if format == "torchscript":
            scripted.save(str(file), _extra_files={METADATA: json.dumps(metadata, indent=1)})
        else:
            metadata |= {"kind": format, "exchange_widths": []}
            compile_package(scripted, file, scalar_type, {PACKAGE_KEY: json.dumps(metadata)})
        append_digest(file)
        if verify:
            exported = load_exported(file)
            for structure, reference in zip(structures, expected, strict=True):
                _compare(exported, structure, reference, hooked)
    return metadata


def _checked_path(path: str | os.PathLike[str]) -> Path:
    target = Path(path)
    if target.is_dir() or not target.parent.is_dir():
        what = "a folder" if target.is_dir() else "a file in a folder that does not exist"
        raise ExportError(f"path: expected the name of a file in an existing folder, got {what}: '{target}'")
    if not os.access(target.parent, os.W_OK):
        raise ExportError(f"path: expected a folder that can be written to, got '{target.parent}'; choose another one")
    return target


def _check_format(format: str, target: Path) -> None:
    if format not in ("torchscript", "aotinductor"):
        raise ExportError(f"format: expected 'torchscript' or 'aotinductor', got {format!r}")
    if format == "aotinductor" and target.suffix != ".pt2":
        raise ExportError(f"path: expected a name that ends in '.pt2' for format 'aotinductor', got '{target.name}'")


def _checked_device(device: torch.device | str | None, model: nn.Module) -> torch.device:
    devices = {str(tensor.device) for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) > 1 or "meta" in devices:
        raise ExportError(
            f"model: expected all of its tensors on one device, got {', '.join(sorted(devices))}; move it with "
            ".to(device)"
        )
    found = parse_device(model_device(model) if device is None else device)
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ExportError(
            "device: expected 'cpu', because this machine has no GPU that torch can use, got 'cuda'; export for the "
            "CPU and open the file with load_exported(path, device='cuda')"
        )
    return found


def _metadata(
    description: dict[str, Any],
    potential: Potential,
    dtype: torch.dtype,
    device: torch.device,
    precompile: Sequence[str],
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "kind": "torchscript",
        **description,
        "dtype": scalar_name(dtype),
        "device": device.type,
        "units": {"energy": "eV", "length": "angstrom"},
        "exchange_widths": potential.exchange_widths.value,
        "versions": {"eqaccel": eqaccel.__version__, "torch": torch.__version__},
        "precompiled": list(precompile),
        "kernels": [f"{module.key:016x}" for module in potential.modules() if isinstance(module, Convolution)],
    }


@contextmanager
def _temporary(target: Path) -> Iterator[Path]:
    """A file of the target's name in a folder beside it; it takes the target's place if all goes well."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".eqaccel-") as folder:
        file = Path(folder) / target.name
        yield file
        os.replace(file, target)


def _compare(exported: Exported, structure: Structure, expected: Mapping[str, Tensor], hooked: str) -> None:
    """Compares a file with the model; bounds are rounding of the absolute contributions, as when patching."""
    dtype = DTYPES[exported.metadata["dtype"]]
    found = exported(*edges_of(structure, exported.metadata["device"], dtype))
    reason = difference(structure, found, expected, ROUNDING * torch.finfo(dtype).eps)
    if reason:
        cure = f"Take away the hooks of {hooked}, which a file may be without" if hooked else "Please report this"
        raise ExportError(f"model: the file does not reproduce the model: {reason}; no file was written. {cure}")

"""eqaccel: fast O(3)-equivariant tensor products and graph convolutions for interatomic potentials.

`eqaccel.patch(model)` accelerates a model in place: MACE, NequIP, SevenNet, or any module that holds modules of e3nn;
`TensorProduct` and `TensorProductConv` are the operators underneath, and `eqaccel.o3` has the classes of `e3nn.o3`.
Importing this package does nothing but define names: torch and the compiled libraries are loaded when one of the names
that needs them is first used. Only in the source folder it does more: see `_hand_over`.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from typing import Any

_HOMES = {
    "Irreps": "eqaccel.irreps",
    "WignerConvention": "eqaccel.wigner",
    "wigner_3j": "eqaccel.wigner",
    "TensorProductSpec": "eqaccel.families.tensor_product",
    "TensorProduct": "eqaccel.ops",
    "TensorProductConv": "eqaccel.ops",
    "LinearSpec": "eqaccel.families.linear",
    "Linear": "eqaccel.ops",
    "MatrixProductSpec": "eqaccel.families.matrix_product",
    "MatrixProduct": "eqaccel.ops",
    "PolynomialSpec": "eqaccel.families.polynomial",
    "Polynomial": "eqaccel.ops",
    "RadialBasisSpec": "eqaccel.families.radial_basis",
    "RadialBasis": "eqaccel.ops",
    "RadialLayerSpec": "eqaccel.families.radial_layer",
    "RadialLayer": "eqaccel.ops",
    "RadialNetworkSpec": "eqaccel.families.radial_network",
    "RadialNetwork": "eqaccel.ops",
    "SiluSpec": "eqaccel.families.silu",
    "ScaledSilu": "eqaccel.ops",
    "GateSpec": "eqaccel.families.gate",
    "Gate": "eqaccel.ops",
    "Graph": "eqaccel.ops",
    "morton_order": "eqaccel.ops",
    "warmup": "eqaccel.prepare",
    "reorder_weights_from_e3nn": "eqaccel.ops",
    "reorder_weights_to_e3nn": "eqaccel.ops",
    "patch": "eqaccel.patches",
    "unpatch": "eqaccel.patches",
    "report": "eqaccel.patches",
    "export": "eqaccel.integrations.export",
    "load_exported": "eqaccel.integrations.export",
    "Calculator": "eqaccel.integrations.ase",
}

_ROOMS = ("o3", "training")

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name == "__version__":  # stands in pyproject.toml alone; the installed package knows it
        from importlib.metadata import version

        return version("eqaccel")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _ROOMS:
        return importlib.import_module(f"eqaccel.{name}")
    raise AttributeError(f"module 'eqaccel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS])


def _hand_over() -> None:
    """Puts the installed package in the place of this one, if this is the source folder.

    Python finds the source folder first where it is started in the repository. That folder holds neither the compiled
    libraries nor all of the modules, so the installed package takes over as a whole.

    Raises:
        ImportError: If no installed package is found.
    """
    runtime = f"{__name__}._runtime"
    if importlib.util.find_spec(runtime) is not None:  # installed; an editable install has an import hook that finds it
        return
    for entry in sys.path:
        spec = importlib.machinery.PathFinder.find_spec(__name__, [entry])
        folders = spec.submodule_search_locations if spec else None
        if spec and spec.loader and folders and importlib.machinery.PathFinder.find_spec(runtime, folders) is not None:
            module = importlib.util.module_from_spec(spec)
            sys.modules[__name__] = module  # an import gives what stands here once it has ended
            spec.loader.exec_module(module)
            return
    source = Path(__file__).resolve().parent
    raise ImportError(
        f"{source} is the source of eqaccel, which does not run by itself, and no installed eqaccel was found; install "
        f"it with: cd {source.parent} && pip install torch numpy scikit-build-core pybind11 cmake ninja && "
        f"pip install --no-build-isolation .",
        name=__name__,
    )


_hand_over()

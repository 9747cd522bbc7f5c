"""eqaccel: fast O(3)-equivariant tensor products and graph convolutions for interatomic potentials.

`eqaccel.patch(model)` accelerates a MACE or NequIP model in place; `TensorProduct` and `TensorProductConv` are the
operators underneath. Importing this package does nothing but define names: torch and the compiled libraries are loaded
when one of the names that needs them is first used.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Irreps": "eqaccel.irreps",
    "WignerConvention": "eqaccel.wigner",
    "wigner_3j": "eqaccel.wigner",
    "TensorProductSpec": "eqaccel.spec",
    "TensorProduct": "eqaccel.ops",
    "TensorProductConv": "eqaccel.ops",
    "MatrixProduct": "eqaccel.ops",
    "PolynomialSpec": "eqaccel.spec",
    "Polynomial": "eqaccel.ops",
    "Graph": "eqaccel.ops",
    "morton_order": "eqaccel.ops",
    "warmup": "eqaccel.ops",
    "reorder_weights_from_e3nn": "eqaccel.ops",
    "reorder_weights_to_e3nn": "eqaccel.ops",
    "patch": "eqaccel.patches",
    "unpatch": "eqaccel.patches",
    "report": "eqaccel.patches",
    "export": "eqaccel.integrations.export",
    "load_exported": "eqaccel.integrations.export",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'eqaccel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

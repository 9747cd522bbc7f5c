"""Which function an activation of e3nn's is, where kernels have it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from eqaccel.codegen.activations import ACTIVATIONS
from eqaccel.errors import PatchError
from eqaccel.families.gate import Activation


def activation_of(act: Any) -> Activation:
    """What an activation computes: its name says which function that may be, and its values have to agree.

    Raises:
        PatchError: If kernels do not have it.
    """
    is_normalized = type(act).__name__ == "normalize2mom"
    inner = act.f if is_normalized else act
    name = getattr(inner, "__name__", type(inner).__name__)
    factor = float(act.cst) if is_normalized and not act._is_id else 1.0
    kind = _KINDS.get(name)
    if kind is not None:
        x = np.concatenate([np.linspace(-30, 30, 121), [1e-8, -1e-8]])
        expected = factor * ACTIVATIONS[kind](x, False)[0]
        with torch.no_grad():
            values = act(torch.from_numpy(x)).numpy()
        if np.allclose(values, expected, rtol=1e-12, atol=1e-14):
            return Activation(kind, factor)
    raise PatchError(f"its activation {name} is none of {', '.join(_KINDS)}")


def silu_factor(act: Any) -> float | None:
    """What an activation multiplies SiLU by; None if it is something else."""
    try:
        activation = activation_of(act)
    except PatchError:
        return None
    return activation.factor if activation.kind == "silu" else None


_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "silu": "silu",
        "SiLU": "silu",
        "tanh": "tanh",
        "Tanh": "tanh",
        "sigmoid": "sigmoid",
        "Sigmoid": "sigmoid",
        "ShiftedSoftPlus": "ssp",  # of e3nn and SevenNet
        "shifted_softplus": "ssp",
        "ShiftedSoftplus": "ssp",  # of NequIP
        "abs": "abs",
    }
)
"""Kinds of activations by names of functions and modules."""

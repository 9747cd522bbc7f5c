"""What a SevenNet model consists of: its convolutions, its elements, its modalities."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from eqaccel.patches.kind import class_names
from torch import nn

CONVOLUTION = "IrrepsConvolution"
FUSED_CONVOLUTION = "IrrepsScatterGatterFusedConvolution"
"""What SevenNet puts in place of its convolution where another library gathers and scatters too."""


def convolutions(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """The convolutions of a model, replaced or not: path, owner, and module."""
    for prefix, parent in model.named_modules():
        for name, module in parent.named_children():
            if class_names(module) & {CONVOLUTION, FUSED_CONVOLUTION}:
                yield f"{prefix}.{name}".lstrip("."), parent, module


def atomic_numbers(model: Any) -> list[int]:
    """The atomic number of each type of atom, in the order of the indices."""
    return sorted(model.type_map, key=model.type_map.__getitem__)


def modalities(model: Any) -> dict[str, int]:
    """The index of each modality that the model may be asked for, in this order; none if it has no modalities."""
    known = getattr(model, "modal_map", None) or {}
    fixed = next((module.modal_idx for module in model.children() if "_ModalInputPrepare" in class_names(module)), None)
    return {name: known[name] for name in sorted(known, key=known.__getitem__) if fixed in (None, known[name])}

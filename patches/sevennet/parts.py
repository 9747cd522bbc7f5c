"""What a SevenNet model consists of: its convolutions, its elements, its modalities, its dtype."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from eqaccel.patches.kind import class_names

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


@contextlib.contextmanager
def one_hot_in(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Has a model embed elements and modalities in a dtype; SevenNet does it in float32, whatever the model is in."""

    def convert(module: Any, _: Any, data: Any) -> None:
        for key in (module.key_output, module.key_additional_output):
            if key is not None:
                data[key] = data[key].to(dtype)

    embeddings = [module for module in model.modules() if "OnehotEmbedding" in class_names(module)]
    handles = [module.register_forward_hook(convert) for module in embeddings if dtype != torch.float32]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

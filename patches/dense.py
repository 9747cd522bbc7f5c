"""Where dense forms of modules are taken: those that save a GPU launches and a CPU nothing."""

from __future__ import annotations

from torch import Tensor


def prefers_dense(x: Tensor) -> bool:
    """Whether the dense form is the faster one where `x` lives."""
    return x.is_cuda

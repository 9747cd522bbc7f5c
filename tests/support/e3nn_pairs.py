"""Modules of `eqaccel.o3` beside those of `e3nn.o3`: the same arguments, the same calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import e3nn.o3
import torch
from torch import Tensor, nn

import eqaccel.o3
from eqaccel.patches.rounding import FACTOR, ROUNDING
from eqaccel.patches.torch_state import default_dtype

Pair = tuple[nn.Module, Any]
"""A module of e3nn, and that of eqaccel."""


def made_alike(
    name: str, *args: Any, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu", **options: Any
) -> Pair:
    """Modules of one name and the same arguments, with the same random weights, in some dtype on some device."""
    pair = []
    for library in (e3nn.o3, eqaccel.o3):
        torch.manual_seed(1)
        with default_dtype(torch.float64):  # e3nn's coupling tensors are rounded to it
            pair.append(getattr(library, name)(*args, **options))
    for parameter in pair[0].parameters():
        nn.init.normal_(parameter)
    pair[1].load_state_dict(pair[0].state_dict())
    return pair[0].to(device, dtype), pair[1].to(device, dtype)


def rows(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def assert_same(value: Tensor, expected: Tensor, dtype: torch.dtype, scale: float | None = None) -> None:
    """Equal but for what rounding in a network of some stages comes to, relative to the largest entry."""
    assert value.shape == expected.shape
    size = float(expected.detach().abs().max()) if scale is None and expected.numel() else scale or 0.0
    difference = float((value.double() - expected.double()).detach().abs().max()) if value.numel() else 0.0
    assert difference <= FACTOR * ROUNDING * torch.finfo(dtype).eps * size


def assert_alike(pair: Pair, operands: Sequence[Tensor], dtype: torch.dtype = torch.float64) -> None:
    """Both give the same, and so do first and second derivatives in the operands and in their parameters.

    Those of e3nn are computed in float64.
    """
    results = []
    for module, scalar in zip(pair, (torch.float64, dtype), strict=True):
        twin = module.to(scalar)
        device = next((tensor.device for tensor in twin.buffers()), operands[0].device)
        leaves = [operand.detach().to(device, scalar).requires_grad_() for operand in operands]
        variables = [*leaves, *twin.parameters()]
        value = twin(*leaves)
        if not value.requires_grad:  # there is nothing that could be differentiated
            results.append([value])
            continue
        order = rows(*value.shape, seed=7).to(value)
        first = torch.autograd.grad((value * order).sum(), variables, create_graph=True, allow_unused=True)
        used = [(g, v) for g, v in zip(first, variables, strict=True) if g is not None and g.requires_grad]
        total = sum((g * rows(*g.shape, seed=8).to(g)).sum() for g, _ in used)
        second = torch.autograd.grad(total, variables, allow_unused=True) if used else []
        zeros = [torch.zeros_like(v) for v in variables]
        results.append([value, *_filled(first, zeros), *_filled(second or zeros, zeros)])
        module.to(dtype)
    for expected, value in zip(*results, strict=True):
        assert_same(value, expected, dtype)


def _filled(gradients: Sequence[Tensor | None], zeros: Sequence[Tensor]) -> list[Tensor]:
    return [zero if gradient is None else gradient for gradient, zero in zip(gradients, zeros, strict=True)]

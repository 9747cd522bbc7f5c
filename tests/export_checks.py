"""What the tests of exported models share, whatever kind of model it is."""

from __future__ import annotations

from typing import Any

import torch
from test_exchange import Images

import eqaccel

RELATIVE = 1e-12
"""Bound of float64 comparisons, relative to the largest entry: some thousand units of rounding."""


def forces(gradient: torch.Tensor, edge_index: torch.Tensor, num_nodes: int) -> torch.Tensor:
    zeros = gradient.new_zeros(num_nodes, 3)
    return zeros.index_add(0, edge_index[0], gradient).index_add(0, edge_index[1], -gradient)


def assert_close(value: torch.Tensor, expected: torch.Tensor, relative: float = RELATIVE) -> None:
    assert value.shape == expected.shape
    assert float((value - expected).abs().max()) <= relative * float(expected.abs().max())


def with_ghosts(vectors: torch.Tensor, edge_index: torch.Tensor, types: torch.Tensor) -> tuple[Any, ...]:
    """Every other edge comes from a ghost, an image of its sender."""
    edges = torch.arange(1, edge_index.shape[1], 2, device=edge_index.device)
    owner = edge_index[0, edges]
    ghosts = edge_index.clone()
    ghosts[0, edges] = len(types) + torch.arange(len(edges), device=edges.device)
    return vectors, ghosts, torch.cat([types, types[owner]]), len(types), Images(owner.tolist())


def assert_ghosts(loaded: eqaccel.integrations.export.Exported, whole: tuple[torch.Tensor, ...]) -> None:
    """A file gives the same with ghosts as without, and exchanges what its metadata say."""
    *rest, images = with_ghosts(*whole)
    for value, wanted in zip(loaded(*rest, images.handle), loaded(*whole), strict=True):
        assert_close(value, wanted)
    widths = loaded.metadata["exchange_widths"]
    assert images.calls == [("forward", w) for w in widths] + [("reverse", w) for w in reversed(widths)]

"""What the tests of exported models share, whatever kind of model it is."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from ghosts import Images
from torch._subclasses.fake_tensor import FakeTensorMode

import eqaccel
from eqaccel.integrations.export import interpreter
from eqaccel.patches.rounding import FACTOR, ROUNDING

RELATIVE = FACTOR * ROUNDING * torch.finfo(torch.float64).eps
"""Bound of float64 comparisons, relative to the largest entry, to which contributions may have cancelled."""


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


def assert_moves_to_a_gpu(loaded: eqaccel.integrations.export.Exported) -> None:
    """No operation meets tensors of a CPU and of a GPU: shown on tensors without contents, which needs no GPU."""
    module = torch.jit.freeze(loaded.module.eval(), preserved_attrs=["node_energies"], optimize_numerics=False)
    graph = module.node_energies.graph
    torch._C._jit_pass_inline(graph)
    run_node = interpreter._run_node

    def run_moved(node: Any, inputs: list[Any], values: dict[str, Any]) -> Any:
        """As the interpreter, but the tensors in the file are on a GPU."""
        results = run_node(node, inputs, values)
        if node.kind() not in ("prim::Constant", "prim::GetAttr") or not torch.is_tensor(results[0]):
            return results
        return [torch.empty(results[0].shape, dtype=results[0].dtype, device="cuda")]

    num_nodes, num_edges = 7, 11
    with FakeTensorMode(), torch.no_grad():
        vectors = torch.empty(num_edges, 3, dtype=getattr(torch, loaded.metadata["dtype"]), device="cuda")
        edge_index = torch.empty(2, num_edges, dtype=torch.int64, device="cuda")
        types = torch.empty(num_nodes, dtype=torch.int64, device="cuda")
        with mock.patch.object(interpreter, "_run_node", run_moved):
            energies = interpreter.run(graph, [module, vectors, edge_index, types, num_nodes, 0])
    assert energies.shape == (num_nodes,)
    assert energies.device.type == "cuda"

"""A small message-passing potential in an exported model's file format, and LAMMPS runs of it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

import eqaccel
import eqaccel.ops
from eqaccel.integrations.export.digest import append_digest

DESCRIPTION = {
    "format": 2,
    "kind": "torchscript",
    "family": "toy",
    "cutoff": 4.0,
    "type_names": ["H", "O", "Si"],
    "dtype": "float64",
    "device": "cpu",
    "units": {"energy": "eV", "length": "angstrom"},
    "exchange_widths": [4, 7],
    "precompiled": [],
    "versions": {"eqaccel": eqaccel.__version__, "torch": torch.__version__},
    "kernels": [],
}


class Toy(nn.Module):
    """Three layers of scalars and vectors with two exchanges of different widths, and short-range repulsion."""

    def __init__(self, cutoff: float) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.cutoff = cutoff
        for name, shape in {"embedding": (3, 4), "mix": (4, 4), "second": (4, 4)}.items():
            self.register_buffer(name, torch.randn(shape, generator=generator, dtype=torch.float64))

    def energies(
        self, vectors: torch.Tensor, edge_index: torch.Tensor, types: torch.Tensor, num_local: int, exchange: int
    ) -> torch.Tensor:
        sender, receiver = edge_index[0], edge_index[1]
        length = vectors.square().sum(1, keepdim=True).sqrt()
        direction = vectors / length
        envelope = (1 - (length / self.cutoff).square()).pow(3)
        nodes, none = self.embedding[types], vectors.new_zeros(num_local, 1)

        repulsion = none.index_add(0, receiver, 0.1 * envelope * (1.5 / length).pow(4))
        first = none.expand(num_local, 4).index_add(0, receiver, envelope * nodes[sender])
        first = torch.tanh(first @ self.mix + nodes[:num_local])
        first = torch.ops.eqaccel.exchange(first, exchange, types.size(0))

        scalars = none.expand(num_local, 4).index_add(0, receiver, envelope * first[sender])
        weights = (envelope * first[sender]).sum(1, keepdim=True)
        vector = none.expand(num_local, 3).index_add(0, receiver, weights * direction)
        second = torch.cat([torch.tanh(scalars @ self.second), vector], 1)
        second = torch.ops.eqaccel.exchange(second, exchange, types.size(0))

        along = (second[sender, 4:] * direction).sum(1, keepdim=True) + second[sender, :4].sum(1, keepdim=True)
        third = none.index_add(0, receiver, envelope * along)
        return (repulsion + 0.1 * torch.tanh(third)).squeeze(1)

    def forward(
        self, vectors: torch.Tensor, edge_index: torch.Tensor, types: torch.Tensor, num_local: int, exchange: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        vectors = vectors.detach().requires_grad_()
        energies = self.energies(vectors, edge_index, types, num_local, exchange)
        gradient = torch.autograd.grad([energies.sum()], [vectors])[0]
        assert gradient is not None
        return energies.detach(), gradient


class Precompiled(nn.Module):
    """Holds a payload with a kernel in machine code, as precompiling leaves it; no model, and never run."""

    def __init__(self) -> None:
        super().__init__()
        content = b"EQACCEL-PAYLOAD 1\nmeta 4\nabi=\nbinary/cpu-avx2/forward/float64 3\nELF\n"
        self.register_buffer("payload", torch.frombuffer(bytearray(content), dtype=torch.uint8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.payload.size(0)


def save_toy(path, **changes) -> str:
    """Writes a model file, with changes to its description, and returns its path."""
    description = {**DESCRIPTION, **changes}
    return save_model(path, Toy(description["cutoff"]).to(getattr(torch, description["dtype"])).eval(), description)


def save_model(path, model: nn.Module, description: dict) -> str:
    """Writes any module in the format of an exported model, and returns the path."""
    torch.jit.script(model).save(str(path), _extra_files={"eqaccel.json": json.dumps(description)})
    append_digest(Path(path))
    return str(path)

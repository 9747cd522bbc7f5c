"""A potential as exported files hold it, whose weights are the same for an edge and its reverse, or are not."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from eqaccel import TensorProductSpec
from eqaccel.ops import MatrixProduct, NeighborKernels, TensorProductConv
from eqaccel.patches.potential import Convolution


class ToyConvolution(Convolution):
    """As files hold it."""

    def forward(self, x: Tensor, y: Tensor, rows: Tensor, edge_index: Tensor) -> Tensor:
        return self.convolve(x, y, rows, edge_index[1], edge_index[0])


class ToyLayer(nn.Module):
    """The end of a network that makes weights."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.eqaccel = MatrixProduct()
        self.register_buffer("weight", weight)

    def factors(self) -> Tensor:
        return self.weight


class OneSided(nn.Module):
    """Weights depend on the type of the sender: an edge and its reverse have the same where all atoms are of one.

    Args:
        turned: Whether the convolution is over edges that lead the other way.
        channels: Of the convolution.
        layers: How often it follows itself.
    """

    def __init__(self, turned: bool = False, channels: int = 4, layers: int = 1) -> None:
        super().__init__()
        self.turned, self.channels, self.layers = turned, channels, layers
        generator = torch.Generator().manual_seed(0)
        made = {"generator": generator, "dtype": torch.float64}
        spec = TensorProductSpec.channelwise(f"{channels}x0e", "1x0e+1x1o", f"{channels}x0e+{channels}x1o")
        last = ToyLayer(torch.randn(3, spec.weight_numel, **made))
        self.conv, self.search = ToyConvolution(TensorProductConv(spec), last), NeighborKernels()
        self.register_buffer("embedding", torch.randn(3, channels, **made))

    def forward(
        self, vectors: Tensor, edge_index: Tensor, types: Tensor, num_local: int, exchange: int
    ) -> tuple[Tensor, Tensor]:
        vectors = vectors.detach().requires_grad_()
        length = vectors.square().sum(1, keepdim=True).sqrt()
        envelope = (1 - (length / 4.0).square()).clamp(min=0.0).pow(3)
        values = torch.cat([envelope, envelope * length, envelope / length], 1) * (1.0 + types[edge_index[0]])[:, None]
        rows = torch.tanh(torch.ops.eqaccel.once_a_pair(torch.ops.eqaccel.of_lengths(values)))
        y = torch.cat([torch.ones_like(length), vectors / length], 1)
        edges = edge_index.flip(0) if self.turned else edge_index
        z = self.conv(self.embedding[types], y, rows, edges)
        for _ in range(self.layers - 1):
            z = self.conv(torch.tanh(z[:, : self.channels]), y, rows, edges)
        scalars, vectors_of_atoms = z[:num_local, : self.channels], z[:num_local, self.channels :]
        energies = 0.01 * torch.tanh(scalars).sum(1) + 0.01 * vectors_of_atoms.square().sum(1)
        gradient = torch.autograd.grad([energies.sum()], [vectors])[0]
        assert gradient is not None
        return energies.detach(), gradient


class Hungry(nn.Module):
    """A model that finds no memory the first few times."""

    def __init__(self, model: OneSided, times: int) -> None:
        super().__init__()
        self.model, self.search, self.left = model, model.search, times

    def forward(
        self, vectors: torch.Tensor, edge_index: torch.Tensor, types: torch.Tensor, num_local: int, exchange: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.left -= 1
        if self.left >= 0:
            raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        energies, gradient = self.model(vectors, edge_index, types, num_local, exchange)
        return energies, gradient

"""What every exported file and every simulation step holds: a potential, which TorchScript can read.

A potential takes edge vectors and gives node energies and their gradient. A node is local if this rank owns it, and a
ghost otherwise; local nodes come first, and only they receive edges. Features of ghosts come from their owners through
the operator `eqaccel::exchange` between two layers, so a layer never computes what another rank computes too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, List, Optional, Tuple  # noqa: UP035 (TorchScript)

import torch
from torch import Tensor, nn

from eqaccel.ops import EdgeWeights, KernelModule, TensorProductConv, convolve_in_pieces
from eqaccel.prepare import scalar_name


class EnableGradients:
    """Records gradients within a `with` block, and restores what was before, after an error too.

    TorchScript has no torch.enable_grad.
    """

    def __init__(self) -> None:
        self.before = torch.is_grad_enabled()

    def __enter__(self) -> None:
        self.before = torch.is_grad_enabled()
        torch.set_grad_enabled(True)

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        torch.set_grad_enabled(self.before)


class NeedsOperators(nn.Module):
    """Tells a program that opens a file without the operators what it has to load; nobody calls it.

    torch compiles the modules of a file in their order, stops at the first operator that it does not know, and prints
    the lines around it, of the code as it is saved: without comments, but with the text of constants. So this module
    comes first in a file, and has the words in the line of an operator.
    """

    def forward(self, features: Tensor) -> Tuple[str, Tensor]:  # noqa: UP006 (TorchScript)
        """Names an operator."""
        return (
            "Load libeqaccel_ops before this file: `python -m eqaccel libs` says where it is.",
            torch.ops.eqaccel.exchange(features, 0, 0),
        )


class Potential(nn.Module):
    """Base of the exported modules: energies by a subclass, their gradient by torch inside the file.

    Args:
        dtype: Floating-point type of the arithmetic, the vectors and the gradient.
        exchange_widths: Columns of the features that are exchanged, an entry for each exchange, in order.
        constants: (num_types,), energies of isolated atoms in eV, float64 in files. They are added in float64, because
            they are thousands of eV where models are trained on all electrons, and float32 has seven digits.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Buffers and parts of the model; torch says that they are tensors or modules."""

    def __init__(self, dtype: torch.dtype, exchange_widths: list[int], constants: Tensor) -> None:
        super().__init__()
        self.needs_operators = NeedsOperators()
        self.register_buffer("constants", constants)
        self.dtype = dtype
        self.dtype_name = scalar_name(dtype)
        self.exchange_widths = torch.jit.Attribute(exchange_widths, list[int])

    def make_piecewise(self) -> None:
        """Has convolutions make weights of edges in pieces, as `given_edges` says; such a potential stays in Python."""
        raise NotImplementedError

    def make_scriptable(self) -> None:
        """Puts modules in place of those that TorchScript cannot read, with the same numbers; before it is scripted."""
        raise NotImplementedError

    def node_energies(
        self, vectors: Tensor, edge_index: Tensor, types: Tensor, num_local: int, exchange: int
    ) -> Tensor:
        """Computes the energies of the local nodes, without the constants.

        Args:
            vectors: (num_edges, 3).
            edge_index: (2, num_edges) int64.
            types: (num_nodes,) int64.
            num_local: Nodes that this rank owns.
            exchange: Handle for `eqaccel::exchange`.

        Returns:
            (num_local,), eV.
        """
        raise NotImplementedError

    def forward(
        self, vectors: Tensor, edge_index: Tensor, types: Tensor, num_local: int, exchange: int
    ) -> Tuple[Tensor, Tensor]:  # noqa: UP006 (TorchScript)
        """Computes the energies of the local nodes, and the gradient of their sum.

        Args:
            vectors: (num_edges, 3), from sender to receiver, periodic shifts included, angstrom; dtype of the file.
            edge_index: (2, num_edges) int64, senders in row 0, receivers in row 1; receivers are local nodes.
            types: (num_nodes,) int64, indices into `type_names` of the metadata; local nodes first.
            num_local: Nodes that this rank owns.
            exchange: Address of an `eqaccel::GhostExchange`; 0 if there are no ghosts (num_local == num_nodes).

        Returns:
            Energies (num_local,) in eV, always float64, and the gradient (num_edges, 3) of their sum in eV/angstrom, in
            the dtype of the file.
        """
        self.check(vectors, edge_index, types, num_local)
        if num_local == 0:
            self.exchange_nothing(vectors, types.size(0), exchange)
            return self.constants[types[:0]].to(torch.float64), torch.zeros_like(vectors)
        energies, gradient = self.differentiate(vectors, edge_index, types, num_local, exchange)
        return self.constants[types[:num_local]].to(torch.float64) + energies, gradient

    def differentiate(
        self, vectors: Tensor, edge_index: Tensor, types: Tensor, num_local: int, exchange: int
    ) -> Tuple[Tensor, Tensor]:  # noqa: UP006 (TorchScript)
        """The energies of `node_energies` and the gradient of their sum, by torch, whatever the caller's mode is."""
        with EnableGradients():
            leaf = vectors.detach().requires_grad_(True)
            energies = self.node_energies(leaf, edge_index, types, num_local, exchange)
            ones: List[Optional[Tensor]] = [torch.ones_like(energies)]  # noqa: UP006, UP045 (TorchScript)
            gradient = torch.autograd.grad([energies], [leaf], ones)[0]
        assert gradient is not None
        return energies.detach(), gradient

    def check(self, vectors: Tensor, edge_index: Tensor, types: Tensor, num_local: int) -> None:
        """Raises if an argument of `forward` does not fit; looks at shapes and dtypes only."""
        if vectors.dim() != 2 or vectors.size(1) != 3:
            raise ValueError(f"vectors: expected shape (num_edges, 3), got {vectors.size()}")
        if vectors.dtype != self.dtype:
            raise ValueError(
                f"vectors: expected {self.dtype_name}, the dtype of the exported model; convert it with .to()"
            )
        if edge_index.dim() != 2 or edge_index.size(0) != 2 or edge_index.size(1) != vectors.size(0):
            raise ValueError(f"edge_index: expected shape (2, {vectors.size(0)}), got {edge_index.size()}")
        if types.dim() != 1:
            raise ValueError(f"types: expected shape (num_nodes,), got {types.size()}")
        if num_local < 0 or num_local > types.size(0):
            raise ValueError(f"num_local: expected 0 to {types.size(0)} (the number of types), got {num_local}")

    def exchange_nothing(self, vectors: Tensor, num_nodes: int, exchange: int) -> None:
        """Takes part in every exchange that the other ranks make, as a rank without atoms of its own."""
        for width in self.exchange_widths:
            torch.ops.eqaccel.exchange(vectors.new_zeros([0, width]), exchange, num_nodes)
        for width in self.exchange_widths[::-1]:
            torch.ops.eqaccel.exchange_backward(vectors.new_zeros([num_nodes, width]), exchange, 0)


class PiecewiseConvolution(nn.Module):
    """A `TensorProductConv` whose weights are to be made yet, by a `DeferredNetwork`.

    A subclass adds the `forward` that a kind of model calls.

    Args:
        conv: The convolution of a patched model.
    """

    def __init__(self, conv: TensorProductConv) -> None:
        super().__init__()
        self.conv = conv

    def convolve(self, x: Tensor, y: Tensor, w: EdgeWeights, receiver: Tensor, sender: Tensor) -> Tensor:
        """The convolution over edges from `sender` to `receiver`, (num_edges,) each; see `convolve_in_pieces`."""
        return convolve_in_pieces(self.conv, x, y, w, receiver, sender)


class Convolution(KernelModule):
    """A `TensorProductConv` as files hold it: no Python but what TorchScript reads, and room for precompiled kernels.

    A subclass adds the `forward` that a kind of model calls.

    Args:
        conv: The convolution of a patched model.
        last: The last layer of the network that makes its weights, if the network leaves that to the convolution, as
            `FirstLayers` does, and gives (rows, terms). So a step can make weights once for an edge and its reverse.
            It has a `MatrixProduct` as its `eqaccel`, which multiplies by its `factors()`, (terms, weights).
    """

    family = TensorProductConv.family

    def __init__(self, conv: TensorProductConv, last: Any = None) -> None:
        super().__init__(conv.spec)
        self.last = last
        self.tuned, self.key, self.payload = conv.tuned, conv.key, conv.payload.clone()
        self.z_dim = conv.z_dim
        self.mul_ir = conv.mul_ir
        self.deterministic = conv.deterministic

    def convolve(self, x: Tensor, y: Tensor, w: Tensor, receiver: Tensor, sender: Tensor) -> Tensor:
        """The convolution over edges from `sender` to `receiver`, (num_edges,) each; as `TensorProductConv`."""
        if self.last is not None:
            return torch.ops.eqaccel.weighted_convolution(
                self.payload,
                self.key,
                self.last.eqaccel.payload,
                self.last.eqaccel.key,
                x,
                y,
                w,
                self.last.factors(),
                receiver,
                sender,
                self.z_dim,
                self.mul_ir,
                self.deterministic,
            )
        num_nodes = x.size(0)
        graph = torch.ops.eqaccel.graph(receiver, sender, num_nodes, num_nodes)
        return torch.ops.eqaccel.tensor_product(
            self.payload, self.key, x, y, w, graph, num_nodes, self.z_dim, self.mul_ir, self.deterministic
        )

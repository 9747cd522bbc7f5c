"""Edges within a cutoff, out of candidates, and forces from the gradients of edges: what a step has around a model."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eqaccel.families.neighbors import NEIGHBORS
from eqaccel.ops.edge_pairs import EdgePairs
from eqaccel.ops.kernel_module import KernelModule
from eqaccel.ops.library import call_operator, load_library

load_library()


class CandidateTensors(NamedTuple):
    """Pairs of atoms that may be within the cutoff, in the order (receiver, sender, shift), each with its reverse.

    Attributes:
        ptr: (num_atoms + 1,) int32, first candidate of each receiver.
        sender: (num_candidates,) int32.
        shift: (num_candidates, 3) int32, cell vectors that are added to the sender.
        t_ptr: (num_atoms + 1,) int32, first entry of `t_order` of each sender.
        t_order: (num_candidates,) int32, candidates in the order (sender, candidate).
    """

    ptr: Tensor
    sender: Tensor
    shift: Tensor
    t_ptr: Tensor
    t_order: Tensor


class EdgeTensors(NamedTuple):
    """The edges within a cutoff.

    Attributes:
        vectors: (capacity, 3), from sender to receiver, periodic shifts included; beyond the last edge, vectors that
            are longer than the cutoff.
        edge_index: (2, capacity) int64, senders and receivers.
        graph: Packed index of the edges, as `Graph.index`, for the atoms and the spare nodes behind them; edges beyond
            the last belong to no receiver.
        num_edges: (1,) int32, how many edges there are; more than the capacity if they did not fit.
    """

    vectors: Tensor
    edge_index: Tensor
    graph: Tensor
    num_edges: Tensor


class NeighborKernels(KernelModule):
    """The kernels of `Neighbors`, for programs that call the operators by themselves."""

    family = NEIGHBORS

    def __init__(self) -> None:
        super().__init__(None)


class Neighbors(NeighborKernels):
    """Finds neighbours among candidates and adds up forces, in a fixed order, without waiting for the device."""

    def forward(
        self,
        positions: Tensor,
        cells: Tensor,
        structure: Tensor,
        candidates: CandidateTensors,
        cutoff: float,
        spare: int,
        capacity: int,
        dtype: torch.dtype,
    ) -> EdgeTensors:
        """Finds the edges that are shorter than the cutoff.

        Args:
            positions: (num_atoms, 3) float64, angstrom.
            cells: (num_structures, 3, 3) float64, a cell vector in each row.
            structure: (num_atoms,) int32, the structure of each atom; any tensor where there is one structure.
            candidates: Which pairs to look at. Indices are not checked.
            cutoff: Angstrom.
            spare: On a GPU, so many nodes follow the atoms, which edges beyond the last are between; at least one.
            capacity: Room for so many edges on a GPU; a CPU makes as much room as there are edges.
            dtype: float32 or float64, of the vectors.

        Raises:
            OperandError: If an operand does not fit.
            CompileError: If the kernels do not compile.
        """
        arguments = (self.payload, self.key, positions, cells, structure, *candidates, cutoff, spare, capacity, dtype)
        return EdgeTensors(*call_operator(torch.ops.eqaccel.neighbors, *arguments))

    def pairs(self, edges: EdgeTensors, num_atoms: int, num_nodes: int, all_reversible: bool = True) -> EdgePairs:
        """Which edges are the reverse of each other, on a GPU.

        Args:
            edges: Of `forward`.
            num_atoms: Number of atoms.
            num_nodes: Number of atoms, and of spare nodes behind them.
            all_reversible: Whether every edge has its reverse. Otherwise those from atoms that receive nothing are
                alone, all others have theirs, and the device is waited for.

        Raises:
            OperandError: If an operand does not fit.
            CompileError: If the kernels do not compile.
        """
        arguments = (self.payload, self.key, edges.vectors, edges.graph, num_atoms, num_nodes, all_reversible)
        row, members, differ = call_operator(torch.ops.eqaccel.neighbor_pairs, *arguments)
        return EdgePairs(row, members, differ, self, all_reversible)

    def forces(self, edges: EdgeTensors, gradient: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
        """The forces and virials that the gradient of an energy in the vectors of edges makes.

        Args:
            edges: Of `forward`.
            gradient: (capacity, 3), dtype of the vectors.
            num_nodes: Number of atoms, and of spare nodes behind them on a GPU.

        Returns:
            Forces (num_nodes, 3) float64; and (num_nodes, 3, 3) float64, for each node the sum of vector times gradient
            over the edges that it receives: summed over atoms, the derivative of the energy in the strain.

        Raises:
            OperandError: If an operand does not fit.
            CompileError: If the kernels do not compile.
        """
        arguments = (self.payload, self.key, edges.vectors, gradient, edges.graph, num_nodes)
        forces, virials = call_operator(torch.ops.eqaccel.edge_forces, *arguments)
        return forces, virials

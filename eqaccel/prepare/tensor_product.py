"""Tuning of tensor products: made-up graphs of a typical size and small ones, and what bounds rounding errors there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eqaccel.codegen import OUTPUTS, Direction
from eqaccel.ops import Graph, KernelModule
from eqaccel.ops.layout import to_ir_mul, to_mul_ir
from eqaccel.prepare.task import Device, Task

_NEIGHBOURS = 60  # edges that a node receives
_CPU_NODES, _GPU_NODES = 200, 2000  # of a problem that is timed, if its operands fit into memory
_LOCAL_RANGE = 64  # neighbours in space are near each other in memory
_CPU_BYTES = 512 * 2**20  # of the operands of a problem on a CPU


@dataclass(frozen=True)
class Problem:
    """Operands for a task.

    Attributes:
        operands: Those of the operator of the task's direction, in its order.
        index: `Graph.index` of the edges; empty for a batch.
        receiver: (num_edges,) int64, the node that each edge adds to.
        sender: (num_edges,) int64, the node that each edge reads from.
        num_receivers: Number of nodes.
        mul_ir: Whether the layout of the operands is (mul, 2l+1).
    """

    operands: tuple[Tensor, ...]
    index: Tensor
    receiver: Tensor
    sender: Tensor
    num_receivers: int
    mul_ir: bool


@dataclass(frozen=True)
class TensorProductTask(Task):
    """A kernel of a tensor product, or of its convolution.

    Attributes:
        batch: Whether it runs on rows without a graph.
        deterministic: Whether gradients of x are added in a fixed order.
        mul_ir: Whether the layout is (mul, 2l+1).
    """

    batch: bool
    deterministic: bool
    mul_ir: bool

    @classmethod
    def of(cls, module: KernelModule, direction: Direction, dtype: torch.dtype, device: Device) -> TensorProductTask:
        """See `Task`."""
        product: Any = module  # one of tensor products, the task of whose family this is
        options = (product.batch, product.deterministic, product.mul_ir)
        return cls(module.family, module.spec, direction, dtype, device, *options)

    @property
    def usage(self) -> str:
        """See `Task`."""
        rows = "batch" if self.batch else "deterministic" if self.deterministic else "atomic"
        shared = ", shared weights" if self.spec.shared_weights else ""
        return f"{self.scalar}, {rows}, {'mul_ir' if self.mul_ir else 'ir_mul'}{shared}"

    def call(self, key: int, problem: Problem) -> tuple[Tensor, ...]:
        """See `Task`."""
        suffix = "" if self.direction is Direction.FORWARD else f"_{self.direction.value}"
        operator = getattr(torch.ops.eqaccel, f"tensor_product{suffix}")
        graph = (problem.index, problem.num_receivers, self.spec.z_dim, problem.mul_ir, self.deterministic)
        with torch.no_grad():
            results = operator(torch.empty(0, dtype=torch.uint8), key, *problem.operands, *graph)
        return (results,) if isinstance(results, Tensor) else tuple(results)

    def typical_problem(self) -> Problem:
        """A graph of 60 neighbours that fills the device, smaller if its memory is short."""
        spec, device = self.spec, self.device.torch_device
        per_row = spec.x_dim + spec.y_dim + spec.weight_numel + (2 * spec.z_dim if self.batch else 0)
        memory = _CPU_BYTES if device.type == "cpu" else torch.cuda.mem_get_info(device)[0] // 4
        # Operands, gradients, tangents and scratch: four times the rows of an edge.
        fitting = memory // (4 * per_row * self.dtype.itemsize * _NEIGHBOURS)
        nodes = max(min(_CPU_NODES if device.type == "cpu" else _GPU_NODES, fitting), 1)
        receiver = torch.arange(nodes, device=device).repeat_interleave(_NEIGHBOURS)
        generator = torch.Generator(device).manual_seed(0)
        steps = torch.randint(-_LOCAL_RANGE, _LOCAL_RANGE + 1, receiver.shape, generator=generator, device=device)
        return self._problem(receiver, (receiver + steps) % nodes, nodes, generator, spec.shared_weights)

    def small_problem(self) -> Problem:
        """A graph with few and with many neighbours; small, because NumPy bounds its rounding errors."""
        device = self.device.torch_device
        generator = torch.Generator(device).manual_seed(1)
        receiver = torch.arange(24, device=device).repeat_interleave(torch.arange(24, device=device))
        sender = torch.randint(24, receiver.shape, generator=generator, device=device)
        return self._problem(receiver, sender, 24, generator, shared=False)

    def _problem(
        self, receiver: Tensor, sender: Tensor, nodes: int, generator: torch.Generator, shared: bool
    ) -> Problem:
        spec, edges = self.spec, len(receiver)
        if self.batch:
            receiver = sender = torch.arange(edges, device=receiver.device)
            nodes = edges

        def normal(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=generator, device=generator.device, dtype=self.dtype)

        operands = [normal(nodes, spec.x_dim), normal(edges, spec.y_dim)]
        operands.append(normal(1 if shared else edges, spec.weight_numel))
        if self.direction is not Direction.FORWARD:
            operands.insert(0, normal(nodes, spec.z_dim))
        if self.direction is Direction.DOUBLE_BACKWARD:
            operands += [normal(*operand.shape) for operand in operands[1:]]
        index = operands[0].new_empty(0, dtype=torch.int32) if self.batch else Graph(receiver, sender, nodes).index
        return Problem(tuple(operands), index, receiver, sender, nodes, self.mul_ir)

    def scales(self, problem: Problem) -> list[Tensor]:
        """See `Task`."""
        names = ("gz", "x", "y", "w", "a", "b", "c")[self.direction is Direction.FORWARD :][: len(problem.operands)]
        x, z = self.spec.irreps_in1, self.spec.irreps_out
        moved = {"x": x, "a": x, "gx": x, "z": z, "gz": z} if problem.mul_ir else {}
        operands = {name: operand.double().cpu() for name, operand in zip(names, problem.operands, strict=True)}
        arrays = {
            name: (to_ir_mul(rows, moved[name]) if name in moved else rows).numpy() for name, rows in operands.items()
        }
        graph: dict[str, Any] = {"receiver": problem.receiver.cpu().numpy(), "sender": problem.sender.cpu().numpy()}
        graph["num_receivers"] = problem.num_receivers
        sums = self.family.reference(self.spec, self.direction, absolute=True, **arrays, **graph)
        results = {name: torch.from_numpy(getattr(sums, name)) for name in OUTPUTS[self.direction]}
        results |= {name: to_mul_ir(rows, moved[name]) for name, rows in results.items() if name in moved}
        return [rows.to(self.device.torch_device) for rows in results.values()]

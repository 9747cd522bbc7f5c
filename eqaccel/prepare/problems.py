"""Made-up problems to run kernels on, of a typical size and small ones, and what bounds their rounding errors."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eqaccel.codegen.check import OUTPUTS
from eqaccel.ops.graph import Graph
from eqaccel.plan import Direction, Plan, execute
from eqaccel.spec import TensorProductSpec

_NEIGHBOURS = 60
_CPU_NODES, _GPU_NODES = 200, 2000
_LOCAL_RANGE = 64  # neighbours in space are near each other in memory
_CPU_BYTES = 512 * 2**20


@dataclass(frozen=True)
class Task:
    """A kernel whose plan is to be chosen, and how it is used.

    Attributes:
        spec: The tensor product.
        batch: Whether it runs on rows without a graph.
        atomic: Whether gradients of x are added atomically.
        mul_ir: Whether the layout is (mul, 2l+1).
        direction: Which derivative.
        dtype: torch.float32 or torch.float64.
        backend: "cpu", "cuda" or "hip".
        arch: Architecture of a GPU, None on the CPU.
        device: Number of the GPU, 0 on the CPU.
    """

    spec: TensorProductSpec
    batch: bool
    atomic: bool
    mul_ir: bool
    direction: Direction
    dtype: torch.dtype
    backend: str
    arch: str | None
    device: int

    @property
    def scalar(self) -> str:
        """The dtype as programs call it."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def usage(self) -> str:
        """All but spec, direction and device, in words."""
        rows = "batch" if self.batch else "atomic" if self.atomic else "deterministic"
        shared = ", shared weights" if self.spec.shared_weights else ""
        return f"{self.scalar}, {rows}, {'mul_ir' if self.mul_ir else 'ir_mul'}{shared}"

    @property
    def torch_device(self) -> torch.device:
        """The device as torch calls it."""
        return torch.device("cpu") if self.backend == "cpu" else torch.device("cuda", self.device)


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


def call(task: Task, key: int, problem: Problem) -> tuple[Tensor, ...]:
    """Runs a task's operator; its program has been registered under `key`, so that no payload is needed."""
    suffix = "" if task.direction is Direction.FORWARD else f"_{task.direction.value}"
    operator = getattr(torch.ops.eqaccel, f"tensor_product{suffix}")
    graph = (problem.index, problem.num_receivers, task.spec.z_dim, problem.mul_ir, task.atomic)
    with torch.no_grad():
        results = operator(torch.empty(0, dtype=torch.uint8), key, *problem.operands, *graph)
    return (results,) if isinstance(results, Tensor) else tuple(results)


def typical_problem(task: Task) -> Problem:
    """A graph of 60 neighbours that fills the device, smaller if its memory is short."""
    spec, device = task.spec, task.torch_device
    per_row = spec.x_dim + spec.y_dim + spec.weight_numel + (2 * spec.z_dim if task.batch else 0)
    memory = _CPU_BYTES if device.type == "cpu" else torch.cuda.mem_get_info(device)[0] // 4
    # Operands, gradients, tangents and scratch: four times the rows of an edge.
    fitting = memory // (4 * per_row * task.dtype.itemsize * _NEIGHBOURS)
    nodes = max(min(_CPU_NODES if device.type == "cpu" else _GPU_NODES, fitting), 1)
    receiver = torch.arange(nodes, device=device).repeat_interleave(_NEIGHBOURS)
    generator = torch.Generator(device).manual_seed(0)
    steps = torch.randint(-_LOCAL_RANGE, _LOCAL_RANGE + 1, receiver.shape, generator=generator, device=device)
    return _build(task, receiver, (receiver + steps) % nodes, nodes, generator, spec.shared_weights)


def small_problem(task: Task) -> Problem:
    """A graph with few and with many neighbours, in ir_mul; small, because NumPy bounds its rounding errors."""
    device = task.torch_device
    generator = torch.Generator(device).manual_seed(1)
    receiver = torch.arange(24, device=device).repeat_interleave(torch.arange(24, device=device))
    sender = torch.randint(24, receiver.shape, generator=generator, device=device)
    return replace(_build(task, receiver, sender, 24, generator, shared=False), mul_ir=False)


def _build(
    task: Task, receiver: Tensor, sender: Tensor, nodes: int, generator: torch.Generator, shared: bool
) -> Problem:
    spec, edges = task.spec, len(receiver)
    if task.batch:
        receiver = sender = torch.arange(edges, device=receiver.device)
        nodes = edges

    def normal(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator, device=generator.device, dtype=task.dtype)

    operands = [normal(nodes, spec.x_dim), normal(edges, spec.y_dim), normal(1 if shared else edges, spec.weight_numel)]
    if task.direction is not Direction.FORWARD:
        operands.insert(0, normal(nodes, spec.z_dim))
    if task.direction is Direction.DOUBLE_BACKWARD:
        operands += [normal(*operand.shape) for operand in operands[1:]]
    index = operands[0].new_empty(0, dtype=torch.int32) if task.batch else Graph(receiver, sender, nodes).index
    return Problem(tuple(operands), index, receiver, sender, nodes, task.mul_ir)


def scales(task: Task, plan: Plan, problem: Problem) -> list[Tensor]:
    """For each result the sum over the absolute values of its terms, to which rounding errors are proportional."""
    names = ("gz", "x", "y", "w", "a", "b", "c")[task.direction is Direction.FORWARD :][: len(problem.operands)]
    arrays = {name: operand.double().cpu().numpy() for name, operand in zip(names, problem.operands, strict=True)}
    graph = {"receiver": problem.receiver.cpu().numpy(), "sender": problem.sender.cpu().numpy()}
    sums = execute(plan, **arrays, **graph, num_receivers=problem.num_receivers, absolute=True)
    return [torch.from_numpy(getattr(sums, name)).to(task.torch_device) for name in OUTPUTS[task.direction]]

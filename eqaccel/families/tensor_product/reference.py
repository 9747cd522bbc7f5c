"""The reference executor: runs a plan in NumPy, as the definition of what a backend has to compute."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eqaccel.codegen import Direction, Result
from eqaccel.families.tensor_product.plan.model import Block, Plan, PlannedPath, Segment
from eqaccel.irreps import Irreps


def execute(
    plan: Plan,
    x: np.ndarray,
    y: np.ndarray,
    w: np.ndarray,
    *,
    receiver: np.ndarray | None = None,
    sender: np.ndarray | None = None,
    num_receivers: int | None = None,
    gz: np.ndarray | None = None,
    a: np.ndarray | None = None,
    b: np.ndarray | None = None,
    c: np.ndarray | None = None,
    absolute: bool = False,
) -> Result:
    """Runs a plan on operands in the (2l+1, mul) layout.

    Args:
        plan: The plan to run.
        x: (num_senders, x_dim) node features.
        y: (num_edges, y_dim) edge attributes.
        w: (num_edges, weight_numel) weights.
        receiver: (num_edges,) receiving node of each edge; None for a batch, where edge n belongs to row n.
        sender: (num_edges,) sending node of each edge, or None as above.
        num_receivers: Rows of the output; needed with `receiver`.
        gz: (num_receivers, z_dim) gradient of the output, for backward and double backward.
        a: Tangent of x, for double backward; b and c likewise for y and w.
        b: Tangent of y.
        c: Tangent of w.
        absolute: Add up the absolute values of all terms instead: what rounding errors are proportional to.

    Returns:
        The outputs of the plan's direction, in the dtype of x.
    """
    if absolute:
        x, y, w = np.abs(x), np.abs(y), np.abs(w)
        gz, a, b, c = (None if operand is None else np.abs(operand) for operand in (gz, a, b, c))
    edges = len(y)
    receiver = np.arange(edges) if receiver is None else receiver
    sender = np.arange(edges) if sender is None else sender
    rows = edges if num_receivers is None else num_receivers
    of_edges = _Edges(
        plan,
        absolute,
        x=x[sender],
        w=np.broadcast_to(w, (edges, w.shape[-1])),
        matrices=_evaluate(plan, y, absolute),
        gz=None if gz is None else gz[receiver],
        a=None if a is None else a[sender],
        c=None if c is None else np.broadcast_to(c, (edges, c.shape[-1])),
        tangents=None if b is None else _evaluate(plan, b, absolute),
        z=np.zeros((edges, plan.spec.z_dim), x.dtype),
        gx=np.zeros((edges, plan.spec.x_dim), x.dtype),
        gy=np.zeros_like(y),
        gw=np.zeros((edges, plan.spec.weight_numel), x.dtype),
    )
    for segment in plan.segments:
        for block in segment.blocks:
            for path in block.paths:
                of_edges.add_path(_PathStep(segment, path), block)
    z = np.zeros((rows, plan.spec.z_dim), x.dtype)
    gx = np.zeros((len(x), plan.spec.x_dim), x.dtype)
    for edge in range(edges):  # by whole rows: np.add.at takes the elements one by one
        gx[sender[edge]] += of_edges.gx[edge]
        z[receiver[edge]] += of_edges.z[edge]
    if plan.direction is Direction.FORWARD:
        return Result(z=z)
    second = plan.direction is Direction.DOUBLE_BACKWARD
    return Result(z=z if second else None, gx=gx, gy=of_edges.gy, gw=of_edges.gw)


def to_ir_mul(irreps: Irreps, rows: np.ndarray) -> np.ndarray:
    """Rows from e3nn's (mul, 2l+1) layout inside each block to (2l+1, mul)."""
    return _relayout(irreps, rows, from_mul_ir=True)


def to_mul_ir(irreps: Irreps, rows: np.ndarray) -> np.ndarray:
    """Rows from the (2l+1, mul) layout inside each block to e3nn's (mul, 2l+1)."""
    return _relayout(irreps, rows, from_mul_ir=False)


def _relayout(irreps: Irreps, rows: np.ndarray, from_mul_ir: bool) -> np.ndarray:
    out = np.empty_like(rows)
    for (mul, ir), where in zip(irreps, irreps.slices(), strict=True):
        shape = (mul, ir.dim) if from_mul_ir else (ir.dim, mul)
        out[:, where] = rows[:, where].reshape(len(rows), *shape).transpose(0, 2, 1).reshape(len(rows), -1)
    return out


def _evaluate(plan: Plan, y: np.ndarray, absolute: bool) -> list[np.ndarray]:
    """Every edge matrix on every edge, (num_edges, d1, d3)."""
    dims = {path.matrix: (path.d1, path.d3) for segment in plan.segments for path in segment.paths}
    values = []
    for number, matrix in enumerate(plan.matrices):
        forms = np.zeros((y.shape[1], len(matrix.entries)), y.dtype)
        for column, terms in enumerate(matrix.entries):
            for j, factor in terms:
                forms[j, column] = abs(factor) if absolute else factor
        elements = [(e.i, e.k, e.entry, 1 if absolute else e.sign) for e in matrix.elements]
        i, k, entry, sign = np.array(elements, int).reshape(-1, 4).T
        out = np.zeros((len(y), *dims[number]), y.dtype)
        out[:, i, k] = sign * np.einsum("ej,jn->en", y, forms)[:, entry]
        values.append(out)
    return values


def _add_attribute_gradient(
    plan: Plan, block: Block, path: PlannedPath, pairs: np.ndarray, gy: np.ndarray, absolute: bool
) -> None:
    matrix = plan.matrices[path.matrix]
    parts = [part for parts in block.passes for part in parts if part.path is path]
    for element in (element for part in parts for element in part.elements):
        for j, factor in matrix.entries[element.entry]:
            signed = element.sign * factor
            gy[:, j] += (abs(signed) if absolute else signed) * pairs[:, element.i, element.k]


@dataclass(frozen=True)
class _Edges:
    """Operands and results with a row for each edge; edge matrices of y, and of its tangent b.

    Products by einsum, not by BLAS, whose last digits depend on the kind of CPU: payloads hold checksums from here.
    """

    plan: Plan
    absolute: bool
    x: np.ndarray
    w: np.ndarray
    matrices: list[np.ndarray]
    gz: np.ndarray | None
    a: np.ndarray | None
    c: np.ndarray | None
    tangents: list[np.ndarray] | None
    z: np.ndarray
    gx: np.ndarray
    gy: np.ndarray
    gw: np.ndarray

    def add_path(self, step: _PathStep, block: Block) -> None:
        """Adds what a path contributes to the results of the plan's direction."""
        path, m = step.path, self.matrices[step.path.matrix]
        x, w = step.rows(self.x, block.x_offset, block.d1), step.weights(self.w)
        if self.plan.direction is Direction.FORWARD:
            step.add(self.z, path.z_offset, w * np.einsum("eik,eiu->eku", m, x))
            return
        assert self.gz is not None
        g = step.rows(self.gz, path.z_offset, path.d3)
        t = np.einsum("eik,eku->eiu", m, g)
        if self.plan.direction is Direction.BACKWARD:
            v = w * x
            step.add(self.gx, block.x_offset, w * t)
            step.add_weight(self.gw, (x * t).sum(1))
        else:
            v = self._add_tangents(step, block, g, t)
        pairs = np.einsum("eiu,eku->eik", v, g)
        _add_attribute_gradient(self.plan, block, path, pairs, self.gy, self.absolute)

    def _add_tangents(self, step: _PathStep, block: Block, g: np.ndarray, t: np.ndarray) -> np.ndarray:
        """The second derivatives but that of y; gives the tangent of weights times x, which is needed for that."""
        assert self.a is not None
        assert self.c is not None
        assert self.tangents is not None
        path = step.path
        m, mb = self.matrices[path.matrix], self.tangents[path.matrix]
        x, w = step.rows(self.x, block.x_offset, block.d1), step.weights(self.w)
        a, c = step.rows(self.a, block.x_offset, block.d1), step.tangent_weights(self.c)
        v = w * a + c * x
        tb = np.einsum("eik,eku->eiu", mb, g)
        step.add(self.z, path.z_offset, np.einsum("eik,eiu->eku", m, v))
        step.add(self.z, path.z_offset, np.einsum("eik,eiu->eku", mb, w * x))
        step.add(self.gx, block.x_offset, w * tb + c * t)
        step.add_weight(self.gw, (a * t + x * tb).sum(1))
        return v


@dataclass(frozen=True)
class _PathStep:
    segment: Segment
    path: PlannedPath

    def rows(self, operand: np.ndarray, offset: int, components: int) -> np.ndarray:
        mul = self.segment.mul
        return operand[:, offset : offset + components * mul].reshape(len(operand), components, mul)

    def weights(self, w: np.ndarray) -> np.ndarray:
        if self.path.weight_offset is None:
            return np.ones((len(w), 1, self.segment.mul), w.dtype)
        return self.rows(w, self.path.weight_offset, 1)

    def tangent_weights(self, c: np.ndarray) -> np.ndarray:
        if self.path.weight_offset is None:
            return np.zeros((len(c), 1, self.segment.mul), c.dtype)
        return self.rows(c, self.path.weight_offset, 1)

    def add(self, target: np.ndarray, offset: int, values: np.ndarray) -> None:
        target[:, offset : offset + values.shape[1] * values.shape[2]] += values.reshape(len(values), -1)

    def add_weight(self, gw: np.ndarray, values: np.ndarray) -> None:
        if self.path.weight_offset is not None:
            gw[:, self.path.weight_offset : self.path.weight_offset + self.segment.mul] += values

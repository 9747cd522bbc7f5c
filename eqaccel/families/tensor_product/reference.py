"""The reference executor: runs a plan in NumPy, as the definition of what a backend has to compute."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eqaccel.codegen import OUTPUTS, Direction, Result
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
    p: np.ndarray | None = None,
    q: np.ndarray | None = None,
    r: np.ndarray | None = None,
    g: np.ndarray | None = None,
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
        gz: (num_receivers, z_dim) gradient of the output, from backward on.
        a: Tangent of x, from double backward on; b and c likewise for y and w.
        b: Tangent of y.
        c: Tangent of w.
        p: Another tangent of x, for triple backward; q, r and g likewise for y, w and gz.
        q: Another tangent of y.
        r: Another tangent of w.
        g: Tangent of gz.
        absolute: Add up the absolute values of all terms instead: what rounding errors are proportional to.

    Returns:
        The outputs of the plan's direction, in the dtype of x.
    """
    given = {"x": x, "y": y, "w": w, "gz": gz, "a": a, "b": b, "c": c, "p": p, "q": q, "r": r, "g": g}
    operands = {name: np.abs(v) if absolute else v for name, v in given.items() if v is not None}
    edges = len(y)
    receiver = np.arange(edges) if receiver is None else receiver
    sender = np.arange(edges) if sender is None else sender
    rows = edges if num_receivers is None else num_receivers
    nodes = {"x": sender, "a": sender, "p": sender, "gz": receiver, "g": receiver}
    columns = {"x": plan.spec.x_dim, "y": plan.spec.y_dim, "z": plan.spec.z_dim, "w": plan.spec.weight_numel}
    kinds = {"z": "z", "gx": "x", "gy": "y", "gw": "w", "ga": "x", "gb": "y", "gc": "w"}
    of_edges = _Edges(
        plan,
        absolute,
        rows={name: operands[name][node] for name, node in nodes.items() if name in operands},
        weights={name: np.broadcast_to(v, (edges, v.shape[-1])) for name, v in operands.items() if name in "wcr"},
        matrices={name: _evaluate(plan, v, absolute) for name, v in operands.items() if name in "ybq"},
        sums={name: np.zeros((edges, columns[kinds[name]]), x.dtype) for name in OUTPUTS[plan.direction]},
    )
    for segment in plan.segments:
        for block in segment.blocks:
            for path in block.paths:
                of_edges.add_path(_PathStep(segment, path), block)
    results = dict(of_edges.sums)
    for name, node, count in (("z", receiver, rows), ("gx", sender, len(x)), ("ga", sender, len(x))):
        if name in results:
            results[name] = _add_rows(results[name], node, count)
    return Result(**results)


def _add_rows(values: np.ndarray, node: np.ndarray, count: int) -> np.ndarray:
    total = np.zeros((count, values.shape[1]), values.dtype)
    for edge, row in enumerate(values):  # by whole rows: np.add.at takes the elements one by one
        total[node[edge]] += row
    return total


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
    """Operands and results with a row for each edge.

    Products by einsum, not by BLAS, whose last digits depend on the kind of CPU: payloads hold checksums from here.

    Attributes:
        rows: Of x, gz and their tangents a, p and g, as far as the direction reads them.
        weights: w, and its tangents c and r.
        matrices: Edge matrices of y, and of its tangents b and q.
        sums: What the direction writes.
    """

    plan: Plan
    absolute: bool
    rows: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]
    matrices: dict[str, list[np.ndarray]]
    sums: dict[str, np.ndarray]

    def add_path(self, step: _PathStep, block: Block) -> None:
        """Adds what a path contributes to the results of the plan's direction."""
        path = step.path
        rows = {name: step.rows(v, block.x_offset, block.d1) for name, v in self.rows.items() if name in "xap"}
        rows |= {name: step.rows(v, path.z_offset, path.d3) for name, v in self.rows.items() if name in ("gz", "g")}
        weights = {name: step.weights(v, name == "w") for name, v in self.weights.items()}
        matrices = {name: of[path.matrix] for name, of in self.matrices.items()}
        gradients: list[str] = [name for name in ("gz", "g") if name in rows]
        transposed = {(y, g): np.einsum("eik,eku->eiu", m, rows[g]) for y, m in matrices.items() for g in gradients}
        values = _Values(rows, weights, matrices, transposed)
        for name, terms in _TERMS[self.plan.direction].items():
            for factors in terms:
                self._add(step, block, name, values, factors.split())

    def _add(self, step: _PathStep, block: Block, name: str, values: _Values, factors: list[str]) -> None:
        path = step.path
        if name == "z":
            step.add(self.sums[name], path.z_offset, values.output(*factors))
        elif name in ("gx", "ga"):
            step.add(self.sums[name], block.x_offset, values.x_gradient(*factors))
        elif name in ("gw", "gc"):
            step.add_weight(self.sums[name], values.w_gradient(*factors))
        else:
            pairs = values.pairs(*factors)
            _add_attribute_gradient(self.plan, block, path, pairs, self.sums[name], self.absolute)


_TERMS: dict[Direction, dict[str, tuple[str, ...]]] = {
    Direction.FORWARD: {"z": ("w x y",)},
    Direction.BACKWARD: {"gx": ("w y gz",), "gw": ("x y gz",), "gy": ("w x gz",)},
    Direction.DOUBLE_BACKWARD: {
        "z": ("w a y", "c x y", "w x b"),
        "gx": ("w b gz", "c y gz"),
        "gw": ("a y gz", "x b gz"),
        "gy": ("w a gz", "c x gz"),
    },
    Direction.TRIPLE_BACKWARD: {
        "z": ("c p y", "r a y", "w p b", "r x b", "w a q", "c x q"),
        "gx": ("w b g", "c y g", "c q gz", "r b gz"),
        "ga": ("w y g", "w q gz", "r y gz"),
        "gw": ("x b g", "a y g", "a q gz", "p b gz"),
        "gc": ("x y g", "x q gz", "p y gz"),
        "gy": ("c p gz", "r a gz", "w a g", "c x g"),
        "gb": ("w p gz", "r x gz", "w x g"),
    },
}
"""The terms of each result: products of one operand each of the kinds of w, x, y and gz, but that of the result."""


@dataclass(frozen=True)
class _Values:
    """The operands of a path, and transposed edge matrices times gradients; products of three of them, by name."""

    rows: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]
    matrices: dict[str, np.ndarray]
    transposed: dict[tuple[str, str], np.ndarray]

    def output(self, w: str, x: str, y: str) -> np.ndarray:
        return np.einsum("eik,eiu->eku", self.matrices[y], self.weights[w] * self.rows[x])

    def x_gradient(self, w: str, y: str, g: str) -> np.ndarray:
        return self.weights[w] * self.transposed[y, g]

    def w_gradient(self, x: str, y: str, g: str) -> np.ndarray:
        return (self.rows[x] * self.transposed[y, g]).sum(1)

    def pairs(self, w: str, x: str, g: str) -> np.ndarray:
        return np.einsum("eiu,eku->eik", self.weights[w] * self.rows[x], self.rows[g])


@dataclass(frozen=True)
class _PathStep:
    segment: Segment
    path: PlannedPath

    def rows(self, operand: np.ndarray, offset: int, components: int) -> np.ndarray:
        mul = self.segment.mul
        return operand[:, offset : offset + components * mul].reshape(len(operand), components, mul)

    def weights(self, values: np.ndarray, own: bool) -> np.ndarray:
        """The path's weights or, if not `own`, their tangents; those of a path without are one, and never change."""
        if self.path.weight_offset is None:
            return np.full((len(values), 1, self.segment.mul), float(own), values.dtype)
        return self.rows(values, self.path.weight_offset, 1)

    def add(self, target: np.ndarray, offset: int, values: np.ndarray) -> None:
        target[:, offset : offset + values.shape[1] * values.shape[2]] += values.reshape(len(values), -1)

    def add_weight(self, gw: np.ndarray, values: np.ndarray) -> None:
        if self.path.weight_offset is not None:
            gw[:, self.path.weight_offset : self.path.weight_offset + self.segment.mul] += values

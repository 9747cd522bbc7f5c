"""The reference executor of products of any mode, in NumPy: the definition of what a backend has to compute.

First pairs of channels are coupled, t[p, k] = sum_ij cg[i, j, k] x[u(p), i] y[v(p), j]; then they are mixed into the
channels of the output, z[w, k] = sum_p M[p, w] t[p, k]. M is a dense matrix of weights, or has one weight in a row. The
derivatives are these two, their transposes, and the gradient of M.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eqaccel.codegen import Direction, Result
from eqaccel.families.tensor_product.pairs.indices import channels_of_output, channels_of_pairs
from eqaccel.families.tensor_product.spec import Mixing, Path, TensorProductSpec


def execute_pairs(
    spec: TensorProductSpec,
    direction: Direction,
    x: NDArray,
    y: NDArray,
    w: NDArray,
    *,
    receiver: NDArray | None = None,
    sender: NDArray | None = None,
    num_receivers: int | None = None,
    gz: NDArray | None = None,
    a: NDArray | None = None,
    b: NDArray | None = None,
    c: NDArray | None = None,
    absolute: bool = False,
) -> Result:
    """Runs a direction of a product on operands in the (2l+1, mul) layout, y in the (mul, 2l+1) layout.

    Args and result are those of `eqaccel.families.tensor_product.reference.execute`.
    """
    if absolute:
        x, y, w = np.abs(x), np.abs(y), np.abs(w)
        gz, a, b, c = (None if operand is None else np.abs(operand) for operand in (gz, a, b, c))
    edges = len(y)
    receiver = np.arange(edges) if receiver is None else receiver
    sender = np.arange(edges) if sender is None else sender
    rows = edges if num_receivers is None else num_receivers
    of_edge = {"x": x[sender], "y": y, "w": np.broadcast_to(w, (edges, w.shape[-1]))}
    if gz is not None:
        of_edge["gz"] = gz[receiver]
    if a is not None and b is not None and c is not None:
        of_edge |= {"a": a[sender], "b": b, "c": np.broadcast_to(c, (edges, c.shape[-1]))}
    dims = {"z": spec.z_dim, "gx": spec.x_dim, "gy": spec.y_dim, "gw": spec.weight_numel}
    sums = {name: np.zeros((edges, dim), x.dtype) for name, dim in dims.items()}
    for path in spec.paths:
        _Path(path, absolute, of_edge, sums).run(direction)
    z, gx = np.zeros((rows, spec.z_dim), x.dtype), np.zeros((len(x), spec.x_dim), x.dtype)
    for edge in range(edges):  # by whole rows: np.add.at takes the elements one by one
        gx[sender[edge]] += sums["gx"][edge]
        z[receiver[edge]] += sums["z"][edge]
    if direction is Direction.FORWARD:
        return Result(z=z)
    return Result(z=z if direction is Direction.DOUBLE_BACKWARD else None, gx=gx, gy=sums["gy"], gw=sums["gw"])


@dataclass(frozen=True)
class _Path:
    """A path on all edges: couplings are (edges, pairs), one array a component; outputs are added to `sums`."""

    path: Path
    absolute: bool
    operands: dict[str, NDArray]
    sums: dict[str, NDArray]

    def run(self, direction: Direction) -> None:
        x, y, w = self._in1("x"), self._in2("y"), self._weights("w")
        t = self._couple(x, y)
        if direction is Direction.FORWARD:
            self._add_output(self._mix(w, t))
            return
        g = self._gradient()
        gt = self._unmix(w, g)
        if direction is Direction.BACKWARD:
            self._add_gradients(self._couple_in1(y, gt), self._couple_in2(x, gt), self._outer(t, g))
            return
        a, b, c = self._in1("a"), self._in2("b"), self._weights("c")
        ta = self._couple(a, y) + self._couple(x, b)
        self._add_output(self._mix(w, ta) + self._mix(c, t))
        gtc = self._unmix(c, g)
        gx = self._couple_in1(b, gt) + self._couple_in1(y, gtc)
        self._add_gradients(gx, self._couple_in2(a, gt) + self._couple_in2(x, gtc), self._outer(ta, g))

    # ---- operands: in1, (edges, pairs, 2l+1) and in2 likewise; weights, (edges, pairs, channels or 1)

    def _in1(self, name: str) -> NDArray:
        path = self.path
        rows = self.operands[name][:, path.x_offset : path.x_offset + path.ir1.dim * path.mul1]
        return rows.reshape(len(rows), path.ir1.dim, path.mul1).transpose(0, 2, 1)[:, channels_of_pairs(path)[0]]

    def _in2(self, name: str) -> NDArray:
        path = self.path
        rows = self.operands[name][:, path.y_offset : path.y_offset + path.ir2.dim * path.mul2]
        return rows.reshape(len(rows), path.mul2, path.ir2.dim)[:, channels_of_pairs(path)[1]]

    def _weights(self, name: str) -> NDArray:
        path, rows = self.path, self.operands[name]
        columns = path.mul3 if self._is_dense else 1
        if path.weight_offset is None:
            value = 1 if name == "w" else 0
            return np.full((len(rows), path.pairs, columns), value, rows.dtype)
        values = rows[:, path.weight_offset : path.weight_offset + path.weight_numel]
        return values.reshape(len(rows), path.pairs, columns)

    def _gradient(self) -> NDArray:
        path, rows = self.path, self.operands["gz"]
        block = rows[:, path.z_offset : path.z_offset + path.ir3.dim * path.mul3]
        return block.reshape(len(rows), path.ir3.dim, path.mul3).transpose(0, 2, 1)

    @property
    def _is_dense(self) -> bool:
        return self.path.mode.mixing is Mixing.DENSE

    # ---- couplings and what they are mixed to

    def _couple(self, x: NDArray, y: NDArray) -> NDArray:
        return self._contract(x, y, (0, 1, 2))

    def _couple_in1(self, y: NDArray, gt: NDArray) -> NDArray:
        return self._contract(y, gt, (1, 2, 0))

    def _couple_in2(self, x: NDArray, gt: NDArray) -> NDArray:
        return self._contract(x, gt, (0, 2, 1))

    def _contract(self, left: NDArray, right: NDArray, axes: tuple[int, int, int]) -> NDArray:
        coupling = self.path.cg().transpose(axes)
        out = np.zeros((*left.shape[:2], coupling.shape[2]), left.dtype)
        for i, j, k in zip(*np.nonzero(coupling), strict=True):
            factor = coupling[i, j, k]
            out[..., k] += (abs(factor) if self.absolute else factor) * left[..., i] * right[..., j]
        return out

    def _mix(self, w: NDArray, t: NDArray) -> NDArray:
        if self._is_dense:
            return np.einsum("epw,epk->ewk", w, t)  # not by BLAS, whose last digits depend on the kind of CPU
        out = np.zeros((len(t), self.path.mul3, t.shape[2]), t.dtype)
        for pair, channel in enumerate(channels_of_output(self.path)):
            out[:, channel] += w[:, pair] * t[:, pair]
        return out

    def _unmix(self, w: NDArray, g: NDArray) -> NDArray:
        if self._is_dense:
            return np.einsum("epw,ewk->epk", w, g)
        return w * g[:, channels_of_output(self.path)]

    def _outer(self, t: NDArray, g: NDArray) -> NDArray:
        if self._is_dense:
            return np.einsum("epk,ewk->epw", t, g)
        return (t * g[:, channels_of_output(self.path)]).sum(2)

    # ---- outputs

    def _add_output(self, z: NDArray) -> None:
        self._add("z", self.path.z_offset, z.transpose(0, 2, 1))

    def _add_gradients(self, gx: NDArray, gy: NDArray, gw: NDArray) -> None:
        path, (u, v) = self.path, channels_of_pairs(self.path)
        of_u, of_v = np.zeros((path.mul1, *gx.shape[::2])), np.zeros((path.mul2, *gy.shape[::2]))
        np.add.at(of_u, u, gx.transpose(1, 0, 2))
        np.add.at(of_v, v, gy.transpose(1, 0, 2))
        self._add("gx", path.x_offset, of_u.transpose(1, 2, 0))
        self._add("gy", path.y_offset, of_v.transpose(1, 0, 2))
        if path.weight_offset is not None:
            self._add("gw", path.weight_offset, gw)

    def _add(self, name: str, offset: int, values: NDArray) -> None:
        flat = values.reshape(len(values), -1)
        self.sums[name][:, offset : offset + flat.shape[1]] += flat

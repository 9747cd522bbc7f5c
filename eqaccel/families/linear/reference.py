"""The reference executor of linear maps, in NumPy: what the kernels of every backend have to compute."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eqaccel.codegen import Direction, Result
from eqaccel.families.linear.spec import LinearSpec


def execute_linear(
    spec: LinearSpec,
    direction: Direction,
    x: NDArray | None = None,
    w: NDArray | None = None,
    y: NDArray | None = None,
    *,
    gz: NDArray | None = None,
    absolute: bool = False,
) -> Result:
    """Runs a direction of a linear map.

    Args:
        spec: The map.
        direction: Forward, backward, or double backward: the derivative by weights alone.
        x: (rows, irreps_in.dim); backward does without, if only gx is wanted.
        w: (weight_numel,); double backward does without.
        y: (rows, num_attributes); None if there are none.
        gz: (rows, irreps_out.dim); forward does without.
        absolute: Add up the absolute values of all terms instead: what rounding errors are proportional to.

    Returns:
        Forward: z. Backward: gx, and with x also gy and gw, the gradients of <gz, z>; gw is (weight_numel,). Double
        backward: gw.
    """
    if direction is Direction.DOUBLE_BACKWARD:
        none = np.zeros(spec.weight_numel)
        return Result(gw=execute_linear(spec, Direction.BACKWARD, x, none, y, gz=gz, absolute=absolute).gw)
    if absolute:
        x, w, y, gz = (None if value is None else np.abs(value) for value in (x, w, y, gz))
    backward = direction is not Direction.FORWARD
    given = gz if backward else x
    assert given is not None
    assert w is not None
    rows = len(given)
    attributes = y if spec.num_attributes else np.ones((rows, 1))
    assert attributes is not None
    z, gx = np.zeros((rows, spec.irreps_out.dim)), np.zeros((rows, spec.irreps_in.dim))
    gy, gw = np.zeros(attributes.shape), np.zeros(spec.weight_numel)
    offsets = spec.weight_offsets
    for path, begin, end in zip(spec.paths, offsets, offsets[1:], strict=False):
        source, target = spec.irreps_in.slices()[path.source], spec.irreps_out.slices()[path.target]
        (mul_in, matrices, mul_out), components = spec.weight_shape(path), spec.irreps_in[path.source].ir.dim
        factor = abs(path.coefficient) if absolute else path.coefficient
        weights = factor * w[begin:end].reshape(mul_in, matrices * mul_out)

        def columns(values: NDArray, place: slice, mul: int, components: int = components) -> NDArray:
            """Columns of a block as (rows, components, mul)."""
            return values[:, place].reshape(rows, mul, components).transpose(0, 2, 1)

        if not backward:
            products = (columns(given, source, mul_in) @ weights).reshape(rows, components, matrices, mul_out)
            sums = (products * attributes[:, None, :, None]).sum(2)
            z[:, target] += sums.transpose(0, 2, 1).reshape(rows, -1)
            continue
        g = columns(given, target, mul_out)
        scaled = (g[:, :, None, :] * attributes[:, None, :, None]).reshape(rows, components, matrices * mul_out)
        gx[:, source] += (scaled @ weights.T).transpose(0, 2, 1).reshape(rows, -1)
        if x is None:
            continue
        xs = columns(x, source, mul_in)
        products = (xs @ weights).reshape(rows, components, matrices, mul_out)
        gy += (products * g[:, :, None, :]).sum((1, 3))
        flat = xs.reshape(rows * components, mul_in).T @ scaled.reshape(rows * components, -1)
        gw[begin:end] = factor * flat.ravel()
    if not backward:
        return Result(z=z)
    return Result(gx=gx) if x is None else Result(gx=gx, gy=gy if spec.num_attributes else None, gw=gw)

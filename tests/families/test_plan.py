"""Plans: what they cover, and the reference executor against plain sums over CG tensors."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from executor_checks import ROUNDING, SPECS, sums_agree

from eqaccel.codegen import Direction, Result
from eqaccel.families.tensor_product import TensorProductSpec, execute, make_plan
from eqaccel.families.tensor_product.reference import to_ir_mul, to_mul_ir
from eqaccel.targets import TARGETS


def _operands(spec: TensorProductSpec) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    edges, nodes = 9, 4
    shapes = {"x": (nodes, spec.x_dim), "y": (edges, spec.y_dim), "w": (edges, spec.weight_numel)}
    operands = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    operands |= {t: rng.normal(size=shapes[n]) for t, n in (("a", "x"), ("b", "y"), ("c", "w"))}
    operands["gz"] = rng.normal(size=(nodes, spec.z_dim))
    edge_ends = {"receiver": rng.integers(0, nodes, edges), "sender": rng.integers(0, nodes, edges)}
    operands |= {t: rng.normal(size=shapes[n]) for t, n in (("p", "x"), ("q", "y"), ("r", "w"))}
    operands["g"] = rng.normal(size=(nodes, spec.z_dim))
    return operands | edge_ends


def _forward(spec: TensorProductSpec, operands: dict[str, np.ndarray], absolute: bool = False) -> np.ndarray:
    """The convolution as e3nn defines it, path by path and edge by edge, in the (2l+1, mul) layout."""
    x, y, w = operands["x"], operands["y"], operands["w"]
    z = np.zeros((len(x), spec.z_dim))
    for path in spec.paths:
        cg = np.abs(path.cg()) if absolute else path.cg()
        d1, d2, d3 = cg.shape
        for e, (r, s) in enumerate(zip(operands["receiver"], operands["sender"], strict=True)):
            xs = x[s, path.x_offset : path.x_offset + d1 * path.mul].reshape(d1, path.mul)
            ys = y[e, path.y_offset : path.y_offset + d2]
            offset = path.weight_offset
            ws = np.ones(path.mul) if offset is None else w[e, offset : offset + path.mul]
            z[r, path.z_offset : path.z_offset + d3 * path.mul] += np.einsum("ijk,iu,j,u->ku", cg, xs, ys, ws).reshape(
                -1
            )
    return z


@pytest.mark.parametrize("target", ["cpu-avx512", "cpu-avx2", "sm_90"])
@pytest.mark.parametrize("name", SPECS)
def test_executor_agrees_with_the_definition_and_its_derivatives(name: str, target: str) -> None:
    spec, operands = SPECS[name], _operands(SPECS[name])
    edges = {key: operands[key] for key in ("receiver", "sender")} | {"num_receivers": len(operands["x"])}
    plans = {direction: make_plan(spec, direction, TARGETS[target], 8) for direction in Direction}
    x, y, w, gz = (operands[key] for key in ("x", "y", "w", "gz"))

    z = execute(plans[Direction.FORWARD], x, y, w, **edges).z
    assert sums_agree(z, _forward(spec, operands), _forward(spec, _absolute(operands), absolute=True))

    backward = execute(plans[Direction.BACKWARD], x, y, w, gz=gz, **edges)
    tangents = {key: operands[key] for key in ("a", "b", "c")}
    # The forward is linear in x and in y, and affine in w where some paths have no weights: its directional derivative.
    forward = plans[Direction.FORWARD]
    directions = (tangents["a"], y, w), (x, tangents["b"], w), (x, y, tangents["c"]), (x, y, np.zeros_like(w))
    parts = [execute(forward, *values, **edges).z for values in directions]
    moved = parts[0] + parts[1] + parts[2] - parts[3]
    size = sum(execute(forward, *values, **edges, absolute=True).z for values in directions)
    along = sum((g * tangents[t]).sum() for g, t in zip((backward.gx, backward.gy, backward.gw), "abc", strict=True))
    assert sums_agree(along, (gz * moved).sum(), (np.abs(gz) * size).sum())

    double = execute(plans[Direction.DOUBLE_BACKWARD], x, y, w, gz=gz, **tangents, **edges)
    assert sums_agree(double.z, moved, size)
    for operand, gradient in (("x", double.gx), ("y", double.gy), ("w", double.gw)):
        if not gradient.size:
            continue
        change = np.random.default_rng(2).normal(size=gradient.shape)

        def along_tangents(values: dict[str, np.ndarray], absolute: bool = False) -> float:
            result = execute(plans[Direction.BACKWARD], *(values[o] for o in "xyw"), gz=gz, **edges, absolute=absolute)
            weights = _absolute(tangents) if absolute else tangents
            return sum((g * weights[t]).sum() for g, t in zip((result.gx, result.gy, result.gw), "abc", strict=True))

        # Affine in each operand, so that a difference is the derivative for a step of any length.
        there = operands | {operand: operands[operand] + change}
        furthest = operands | {operand: np.abs(operands[operand]) + np.abs(change)}
        difference = along_tangents(there) - along_tangents(operands)
        assert sums_agree((gradient * change).sum(), difference, 2 * along_tangents(furthest, absolute=True))


def _absolute(operands: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {key: np.abs(value) for key, value in operands.items()}


@pytest.mark.parametrize("name", SPECS)
def test_absolute_values_of_all_terms(name: str) -> None:
    spec, signed = SPECS[name], _operands(SPECS[name])
    edges = {key: signed.pop(key) for key in ("receiver", "sender")} | {"num_receivers": len(signed["x"])}
    results = []
    for direction in Direction:
        plan = make_plan(spec, direction, TARGETS["cpu-avx2"], 8)
        right, absolute = (execute(plan, **signed, **edges, absolute=flag) for flag in (False, True))
        for output, bound in vars(absolute).items():
            assert bound is None or (np.abs(vars(right)[output]) <= bound * (1 + ROUNDING)).all()
        results.append(absolute)
    operands = _absolute(signed)
    forward, backward, double, triple = results
    expected = _forward(spec, operands | edges, absolute=True)
    assert sums_agree(forward.z, expected, expected)
    # The terms of z are linear in x and in y, so those of the gradients add up to the same.
    total = (operands["gz"] * forward.z).sum()
    assert sums_agree((backward.gx * operands["x"]).sum(), total, total)
    assert sums_agree((backward.gy * operands["y"]).sum(), total, total)
    moved = sum((getattr(backward, f"g{o}") * operands[t]).sum() for o, t in zip("xyw", "abc", strict=True))
    assert sums_agree((operands["gz"] * double.z).sum(), moved, moved)
    # Of those of the double backward along p, q, r and g, each has one of the tangents a, b and c, and gz or g.
    along = _along(double, operands)
    assert sums_agree(sum((getattr(triple, f"g{o}") * operands[o]).sum() for o in "abc"), along, along)
    assert sums_agree((operands["gz"] * triple.z).sum() + (operands["g"] * double.z).sum(), along, along)


def _along(double: Result, operands: dict[str, np.ndarray]) -> float:
    """Results of the double backward times the tangents that the triple backward takes beside those."""
    return sum((getattr(double, o) * operands[t]).sum() for o, t in zip(("z", "gx", "gy", "gw"), "gpqr", strict=True))


@pytest.mark.parametrize("target", ["cpu-avx512", "sm_90"])
@pytest.mark.parametrize("name", SPECS)
def test_executor_of_third_derivatives_agrees_with_that_of_second_ones(name: str, target: str) -> None:
    spec, signed = SPECS[name], _operands(SPECS[name])
    edges = {key: signed.pop(key) for key in ("receiver", "sender")} | {"num_receivers": len(signed["x"])}
    double, triple = (
        make_plan(spec, direction, TARGETS[target], 8)
        for direction in (Direction.DOUBLE_BACKWARD, Direction.TRIPLE_BACKWARD)
    )
    found = execute(triple, **signed, **edges)

    def along(values: dict[str, np.ndarray], absolute: bool = False) -> float:
        taken = {name: value for name, value in values.items() if name not in set("gpqr")}
        result = execute(double, **taken, **edges, absolute=absolute)
        return _along(result, _absolute(values) if absolute else values)

    # Affine in each operand, so that a difference is the derivative for a step of any length.
    for operand, output in zip(
        ("x", "y", "w", "gz", "a", "b", "c"), ("gx", "gy", "gw", "z", "ga", "gb", "gc"), strict=True
    ):
        gradient = getattr(found, output)
        change = np.random.default_rng(3).normal(size=gradient.shape)
        there = signed | {operand: signed[operand] + change}
        furthest = signed | {operand: np.abs(signed[operand]) + np.abs(change)}
        difference = along(there) - along(signed)
        assert sums_agree((gradient * change).sum(), difference, 2 * along(furthest, absolute=True))


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", SPECS)
def test_segments_hold_every_path_once(name: str, target: str, direction: Direction) -> None:
    plan = make_plan(SPECS[name], direction, TARGETS[target], 4)
    numbers = sorted(path.number for segment in plan.segments for path in segment.paths)
    assert numbers == list(range(len(SPECS[name].paths)))
    assert plan == make_plan(SPECS[name], direction, TARGETS[target], 4)
    assert str(SPECS[name].paths[0]) in plan.explain()


@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.DOUBLE_BACKWARD])
def test_gpu_segments_do_not_share_an_output(direction: Direction) -> None:
    spec = TensorProductSpec(
        "64x0e+64x1o+64x2e",
        "0e+1o+2e",
        "64x0e+64x1o+64x2e",
        [
            (i, j, k, "uvu", True)
            for i, j, k in itertools.product(range(3), repeat=3)
            if abs(i - j) <= k <= i + j and (i + j + k) % 2 == 0
        ],
    )
    plan = make_plan(spec, direction, TARGETS["sm_90"], 8)
    offsets = [offset for segment in plan.segments for offset in segment.z_offsets]
    assert len(offsets) == len(set(offsets))


def test_layouts_are_inverse_to_each_other() -> None:
    spec = SPECS["ragged"]
    rows = np.random.default_rng(0).normal(size=(3, spec.x_dim))
    assert (to_mul_ir(spec.irreps_in1, to_ir_mul(spec.irreps_in1, rows)) == rows).all()

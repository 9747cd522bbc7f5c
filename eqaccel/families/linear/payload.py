"""The payload of a linear map: a body for each direction and backend, and its paths."""

from __future__ import annotations

import functools
from itertools import pairwise

from eqaccel.codegen import COMMON, SCALAR_BYTES, Direction, Result, check, family_prelude, pack
from eqaccel.families.linear.body import CPU_BODY, print_linear, write_linear
from eqaccel.families.linear.plan import SHAPES, LinearPlan, make_plan
from eqaccel.families.linear.reference import execute_linear
from eqaccel.families.linear.spec import LinearSpec
from eqaccel.families.linear.weights import (
    CPU_WEIGHTS_BODY,
    THREADS,
    make_weights_plan,
    print_weights,
    write_weights,
)

NAME = "linear"
"""Of the family."""

DIRECTIONS = COMMON
"""Those with kernels: the map, its transpose, and as double backward the derivative by weights, for training."""


@functools.lru_cache(maxsize=64)
def linear_payload(spec: LinearSpec) -> tuple[bytes, int]:
    """The payload of a linear map, and the integer key that names it.

    Meta has `shared_weights`, as all rows have the same, for each GPU body "<body>/outputs" and "<body>/shapes", its
    kernels. For each of these it has "<body>/<shape>/threads" of a block, and for each output "<body>/<shape>/<n>/rows"
    and "<body>/<shape>/<n>/tiles": rows that a block takes, and blocks side by side. Of the derivative by weights it
    has "<body>/squares" and "<body>/threads": blocks for a part of the rows, and their threads. Entry `paths` has a
    line "<first column of x> <mul> <first column of z> <mul> <components> <first weight> <coefficient>" for each path.
    """
    x, y, z, w = spec.irreps_in.dim, spec.num_attributes, spec.irreps_out.dim, spec.weight_numel
    numbers = {"x_dim": x, "y_dim": y, "w_dim": w, "z_dim": z, "shared_weights": 1}
    entries = {f"prelude/{backend}": linear_prelude(backend) for backend in ("cpu", "cuda", "hip")}
    entries["check/blocks"] = "".join(f"{n} 1 {dim}\n" for n, dim in zip("xywz", (x, y, w, z), strict=True) if dim)
    for direction in DIRECTIONS:
        entries[f"cpu/{direction.value}"] = print_body(spec, direction)
        entries[f"tables/cpu/{direction.value}"] = cpu_tables(spec, direction)
        entries[f"plan/cpu/{direction.value}"] = explain(spec, direction)
        entries[f"check/{direction.value}"] = _checksums(spec, direction)
        for scalar, scalar_bytes in SCALAR_BYTES.items():
            body = f"gpu/{direction.value}/{scalar}"
            entries[body] = print_body(spec, direction, scalar_bytes)
            entries[f"plan/{body}"] = explain(spec, direction)
            if direction is Direction.DOUBLE_BACKWARD:
                numbers |= {f"{body}/squares": make_weights_plan(spec).squares, f"{body}/threads": THREADS}
            else:
                numbers |= _launches(make_plan(spec, direction), body, scalar_bytes)
    entries["paths"] = "".join(_path_lines(spec))
    return pack(NAME, numbers, entries)


def print_body(spec: LinearSpec, direction: Direction, gpu_scalar_bytes: int | None = None) -> str:
    """The body of a direction.

    Args:
        spec: The maps.
        direction: Which derivative.
        gpu_scalar_bytes: Bytes of a number on a GPU; None for the CPU, whose body serves all specs and both numbers.
    """
    of_weights = direction is Direction.DOUBLE_BACKWARD
    if gpu_scalar_bytes is None:
        return CPU_WEIGHTS_BODY if of_weights else CPU_BODY
    if of_weights:
        return print_weights(make_weights_plan(spec))
    return print_linear(make_plan(spec, direction), gpu_scalar_bytes)


def cpu_tables(spec: LinearSpec, direction: Direction) -> str:
    """What the kernel of a direction for the CPU takes with its operands."""
    if direction is Direction.DOUBLE_BACKWARD:
        return write_weights(make_weights_plan(spec))
    return write_linear(make_plan(spec, direction))


def _launches(plan: LinearPlan, body: str, scalar_bytes: int) -> dict[str, int]:
    """What the runtime has to know of the kernels of a body."""
    shapes = SHAPES[scalar_bytes]
    numbers = {f"{body}/outputs": len(plan.outputs), f"{body}/shapes": len(shapes)}
    for k, shape in enumerate(shapes):
        numbers[f"{body}/{k}/threads"] = shape.threads
        tiles = {tile.components: tile for tile in plan.tiles(shape)}
        for n, output in enumerate(plan.outputs):
            tile = tiles[output.components]
            numbers[f"{body}/{k}/{n}/rows"] = tile.block_rows
            numbers[f"{body}/{k}/{n}/tiles"] = -(-output.mul // tile.block_columns)
    return numbers


def _path_lines(spec: LinearSpec) -> list[str]:
    lines = []
    for path, (begin, end) in zip(spec.paths, pairwise(spec.weight_offsets), strict=True):
        if begin == end:
            continue
        mul_in, _, mul_out = spec.weight_shape(path)
        first, target = spec.irreps_in.slices()[path.source].start, spec.irreps_out.slices()[path.target].start
        components = spec.irreps_in[path.source].ir.dim
        lines.append(f"{first} {mul_in} {target} {mul_out} {components} {begin} {float(path.coefficient)!r}\n")
    return lines


def linear_prelude(backend: str) -> str:
    """The text in front of every body of a backend."""
    return family_prelude("linear_weights", backend, __package__)


def explain(spec: LinearSpec, direction: Direction) -> str:
    """How the kernel of a direction works, in words."""
    kind = f"mixed by {spec.num_attributes} attributes" if spec.num_attributes else "the same for all rows"
    maps = f"{spec.irreps_in} to {spec.irreps_out}, {spec.weight_numel} weights"
    if direction is Direction.DOUBLE_BACKWARD:
        weights = make_weights_plan(spec)
        sides = " or ".join(str(side) for side in sorted({weights.side(matrix) for matrix in weights.matrices}))
        return (
            f"{direction.value}, the derivative by weights, of linear maps: {maps}, {kind}\n"
            f"  {len(weights.matrices)} paths, {weights.squares} squares of {sides} rows and columns on a GPU\n"
        )
    plan = make_plan(spec, direction)
    return (
        f"{direction.value} of linear maps: {maps}, {kind}\n"
        f"  {len(plan.outputs)} blocks written, {len(spec.paths)} paths; rows in the order of their attributes\n"
    )


def _checksums(spec: LinearSpec, direction: Direction) -> str:
    """What the self-check (`codegen.check`) compares a batch with; weights are one row.

    Backward gives gx and no more, double backward gw.
    """
    of_x, of_gz = spec.irreps_in.dim, spec.irreps_out.dim
    read = {
        Direction.FORWARD: {"x": of_x},
        Direction.BACKWARD: {"gz": of_gz},
        Direction.DOUBLE_BACKWARD: {"x": of_x, "gz": of_gz},
    }[direction]
    attributes = {"y": spec.num_attributes} if spec.num_attributes else {}
    operands = check.batch_operands(direction, {**read, **attributes})
    if direction is not Direction.DOUBLE_BACKWARD:
        operands["w"] = check.numbers("w", 1, spec.weight_numel)[0]

    def execute(absolute: bool) -> Result:
        result = execute_linear(spec, direction, **operands, absolute=absolute)
        return Result(gw=result.gw[None]) if result.gw is not None else result

    return check.checksums(direction, execute)

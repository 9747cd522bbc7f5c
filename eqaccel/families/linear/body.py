"""The text of a linear map: on a GPU its blocks stand in it as tables; on a CPU one text serves all maps."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from eqaccel.families.linear.plan import NO_FACTOR, SHAPES, Factor, LinearPlan, kernel_name

CPU_BODY = "EQ_EXPORT_LINEAR\n"
"""Of all maps, whose tables come with their operands."""


def _numbers(plan: LinearPlan, *, is_gpu: bool) -> tuple[list[list[int]], list[Factor]]:
    """The outputs, each with where its factors begin and end, and all factors."""
    outputs: list[list[int]] = []
    factors: list[Factor] = []
    for output in plan.outputs:
        terms = output.factors or ((NO_FACTOR,) if is_gpu else ())
        begin = len(factors)
        factors += terms
        outputs.append([output.first, output.mul, output.components, begin, len(factors)])
    return outputs, factors


def _integers(factor: Factor) -> list[int]:
    return [factor.first, factor.terms, factor.begin, factor.stride, factor.matrix_stride]


def write_tables(integers: Iterable[int], reals: Iterable[float]) -> str:
    """The entry of a payload that a kernel for the CPU gets with its operands."""
    return " ".join(map(str, integers)) + "\n" + " ".join(map(repr, reals)) + "\n"


def write_linear(plan: LinearPlan) -> str:
    """The tables of a direction for the CPU, which `LinearMap` of cpu_linear.h reads."""
    outputs, factors = _numbers(plan, is_gpu=False)
    sizes = [plan.in_dim, plan.out_dim, plan.attributes, len(outputs), len(factors), plan.most_staged]
    numbers = chain(sizes, *outputs, *map(_integers, factors))
    return write_tables(numbers, (factor.coefficient for factor in factors))


def print_linear(plan: LinearPlan, scalar_bytes: int) -> str:
    """The body of a direction for GPUs.

    Args:
        plan: The plan of the direction.
        scalar_bytes: Bytes of a number.
    """
    outputs, factors = _numbers(plan, is_gpu=True)
    lines = "\n    ".join
    output_lines = ["{" + ", ".join(map(str, numbers)) + "}," for numbers in outputs]
    factor_lines = ["{" + ", ".join(map(str, _integers(f))) + f", T({f.coefficient!r})" + "}," for f in factors]
    return f"""namespace {{
EQ_TABLE Output output_table[] = {{
    {lines(output_lines)}
}};
EQ_TABLE Factor factor_table[] = {{
    {lines(factor_lines)}
}};
struct Problem {{
  static constexpr int in_dim = {plan.in_dim}, out_dim = {plan.out_dim}, attributes = {plan.attributes};
  static constexpr int outputs = {len(outputs)};
  static EQ_FN Output output(int n) {{ return output_table[n]; }}
  static EQ_FN Factor factor(int n) {{ return factor_table[n]; }}
}};
}}  // namespace
{_kernels(plan, scalar_bytes)}
"""


def _kernels(plan: LinearPlan, scalar_bytes: int) -> str:
    """The GPU kernels, each with a tile for each number of components."""
    lines = []
    for number, shape in enumerate(SHAPES[scalar_bytes]):
        tiles = [
            f"Tile<{t.components}, {t.rows}, {t.columns}, {t.row_warps}, {t.column_warps}, {t.terms}>"
            for t in plan.tiles(shape)
        ]
        arguments = [kernel_name(number), str(shape.threads), str(shape.resident), "Problem", *tiles]
        lines.append("EQ_EXPORT_LINEAR(" + ",\n                 ".join(arguments) + ")")
    return "\n".join(lines)

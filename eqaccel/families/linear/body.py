"""The text of a linear map: its blocks as tables, which the preludes work through."""

from __future__ import annotations

from collections.abc import Iterable

from eqaccel.families.linear.plan import NO_FACTOR, SHAPES, LinearPlan, kernel_name


def print_linear(plan: LinearPlan, gpu_scalar_bytes: int | None = None) -> str:
    """The body of a direction.

    Args:
        plan: The plan of the direction.
        gpu_scalar_bytes: Bytes of a number on a GPU; None for the CPU, whose body serves both.
    """
    outputs, factors, end = [], [], 0
    for output in plan.outputs:
        terms = output.factors or (() if gpu_scalar_bytes is None else (NO_FACTOR,))
        begin, end = end, end + len(terms)
        numbers = [output.first, output.mul, output.components, begin, end]
        outputs.append("{" + ", ".join(map(str, numbers)) + "},")
        for f in terms:
            numbers = [f.first, f.terms, f.begin, f.stride, f.matrix_stride]
            factors.append("{" + ", ".join(map(str, numbers)) + f", T({f.coefficient!r})" + "},")
    lines = "\n    ".join
    sizes = f"outputs = {len(outputs)}" + (f", most_staged = {plan.most_staged}" if gpu_scalar_bytes is None else "")
    return f"""namespace {{
EQ_TABLE Output output_table[] = {{
    {lines(outputs)}
}};
EQ_TABLE Factor factor_table[] = {{
    {lines(factors)}
}};
struct Problem {{
  static constexpr int in_dim = {plan.in_dim}, out_dim = {plan.out_dim}, attributes = {plan.attributes};
  static constexpr int {sizes};
  static EQ_FN Output output(int n) {{ return output_table[n]; }}
  static EQ_FN Factor factor(int n) {{ return factor_table[n]; }}
{print_components(plan.components) if gpu_scalar_bytes is None else ""}}};
}}  // namespace
{"EQ_EXPORT_LINEAR(Problem)" if gpu_scalar_bytes is None else _kernels(plan, gpu_scalar_bytes)}
"""


def print_components(components: Iterable[int]) -> str:
    """The choice of code for a number of components, on the CPU."""
    cases = "\n".join(f"      case {n}: return run(Components<{n}>{{}});" for n in components)
    return f"""  template <class Run>
  static EQ_FN void with_components(int components, const Run& run) {{
    switch (components) {{
{cases}
    }}
  }}
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

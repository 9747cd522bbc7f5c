"""The text of a linear map: its blocks as tables, which the preludes work through."""

from __future__ import annotations

from eqaccel.families.linear.plan import WARPS, LinearPlan


def print_linear(plan: LinearPlan, gpu_scalar_bytes: int | None = None) -> str:
    """The body of a direction.

    Args:
        plan: The plan of the direction.
        gpu_scalar_bytes: Bytes of a number on a GPU; None for the CPU, whose body serves both.
    """
    outputs, factors, end = [], [], 0
    for output in plan.outputs:
        begin, end = end, end + len(output.factors)
        numbers = [output.first, output.mul, output.components, begin, end]
        outputs.append("{" + ", ".join(map(str, numbers)) + "},")
        for f in output.factors:
            numbers = [f.first, f.terms, f.begin, f.stride, f.matrix_stride]
            factors.append("{" + ", ".join(map(str, numbers)) + f", T({f.coefficient!r})" + "},")
    cases = "\n".join(f"      case {n}: return run(Components<{n}>{{}});" for n in plan.components)
    lines = "\n    ".join
    if gpu_scalar_bytes is None:
        sizes = f"most_staged = {plan.most_staged}"
    else:
        vectors, rows = plan.vectors(gpu_scalar_bytes), plan.rows(gpu_scalar_bytes)
        most = plan.components[-1]
        sizes = f"warps = {WARPS}, vectors = {vectors}, rows = {rows}, components = {most}"
    return f"""namespace {{
EQ_TABLE Output output_table[] = {{
    {lines(outputs)}
}};
EQ_TABLE Factor factor_table[] = {{
    {lines(factors)}
}};
struct Problem {{
  static constexpr int in_dim = {plan.in_dim}, out_dim = {plan.out_dim}, attributes = {plan.attributes};
  static constexpr int outputs = {len(outputs)}, {sizes};
  static EQ_FN Output output(int n) {{ return output_table[n]; }}
  static EQ_FN Factor factor(int n) {{ return factor_table[n]; }}
  template <class Run>
  static EQ_FN void with_components(int components, const Run& run) {{
    switch (components) {{
{cases}
    }}
  }}
}};
}}  // namespace
EQ_EXPORT_LINEAR(Problem)
"""

"""Bodies of several translation units, which a compiler of the host takes side by side: gradients of large products."""

from __future__ import annotations

from eqaccel.codegen import Direction
from eqaccel.families.tensor_product.plan import KernelPlan, Plan
from eqaccel.families.tensor_product.text import literal

_ENTRIES_OF_FUNCTION = 500  # the time of a compiler grows faster than the length of a function


def parameters(direction: Direction) -> str:
    """What the code of a segment takes beside an edge's rows: edge matrices, gradients of attributes; with types."""
    second = direction.gradients > 1
    return ", ".join(f"{'Sum' if name[0] == 'g' else 'const T'}* {name}" for name in _names(second))


def arguments(direction: Direction) -> str:
    """The same without types."""
    return ", ".join(_names(direction.gradients > 1))


def _names(second: bool) -> list[str]:
    return ["entries", "entries_b", *(["entries_q"] if second else []), "gy", *(["gb"] if second else [])]


def head(plan: Plan) -> list[str]:
    """The head of a body of several translation units: their number, and the functions that one calls of another.

    The text holds all of them. A compiler that is told no EQ_UNIT makes one of all.
    """
    functions = _functions(plan)
    if not functions:
        return []
    return [
        f"#define EQ_UNITS {count_units(plan)}",
        "#ifdef EQ_UNIT",
        "#define EQ_IN_UNIT(n) (EQ_UNIT == (n))",
        "#else",
        "#define EQ_IN_UNIT(n) 1",
        "#endif",
        *(f'extern "C" void {signature};' for _, signature, _ in functions),
        "",
    ]


def export(plan: Plan) -> list[str]:
    """The end of a body: what the runtime calls, and functions that are not in the first translation unit."""
    functions = _functions(plan)
    if not functions:
        return ["EQ_EXPORT(kernel0::Problem)"]
    lines = ["#if EQ_IN_UNIT(0)", "EQ_EXPORT(kernel0::Problem)", "#endif"]
    for unit, signature, code in functions:
        lines += [f"#if EQ_IN_UNIT({unit})", f'extern "C" __attribute__((noinline)) void {signature} {{']
        lines += [f"  {line}" for line in code]
        lines += ["}", "#endif"]
    return lines


def count_units(plan: Plan | KernelPlan) -> int:
    """Translation units of a body."""
    return 1 + max((segment.unit for segment in plan.segments), default=0)


def _functions(plan: Plan) -> list[tuple[int, str, list[str]]]:
    """What is not in the first translation unit of a CPU kernel: unit, signature and code of each function."""
    functions: list[tuple[int, str, list[str]]] = []
    for number, segment in enumerate(plan.segments):
        if segment.unit:
            rows = "*static_cast<const EdgeRows*>(rows)"
            call = f"kernel0::Segment{number}::code({rows}, {arguments(plan.direction)});"
            signature = f"eq_segment_{number}(const void* rows, {parameters(plan.direction)})"
            functions.append((segment.unit, signature, [call]))
    if functions:
        for number, code in enumerate(entry_functions(plan.kernels[0])):
            unit = 1 + number % (count_units(plan) - 1)
            functions.append((unit, f"eq_entries_{number}(const Lane* y, Lane* m)", code))
    return functions


def entry_functions(plan: KernelPlan) -> list[list[str]]:
    """The code of the functions that compute the entries of edge matrices where there are several units."""
    lines = entry_lines(plan)
    return [lines[n : n + _ENTRIES_OF_FUNCTION] for n in range(0, len(lines), _ENTRIES_OF_FUNCTION)]


def entry_lines(plan: KernelPlan) -> list[str]:
    """The entries of the edge matrices of an edge, each a sum of terms."""
    lines = []
    for matrix, first in plan.first_entry.items():
        for number, terms in enumerate(plan.matrices[matrix].entries, first):
            total = " + ".join(f"{literal(factor)} * y[{j}]" for j, factor in terms)
            lines.append(f"m[{number}] = {total};")
    return lines

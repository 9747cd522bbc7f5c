"""Small pieces of C++ text."""

from __future__ import annotations

from collections.abc import Iterable

_TABLE_COLUMNS = 80  # after which a line of a table ends


def literal(value: float) -> str:
    """A number of the kernel's type, to the last bit."""
    return f"T({value!r})"


def table(scalar: str, values: Iterable[str], index: str = "n", memory: str = "constexpr") -> str:
    """The body of a function that looks something up; a table without values has a zero, which arrays in C++ need."""
    return f"static {memory} {scalar} values[] = {{{wrapped(values) or '{}'}}}; return values[{index}];"


def wrapped(values: Iterable[str]) -> str:
    """A list of values on lines of about a hundred columns."""
    lines = [""]
    for value in values:
        if len(lines[-1]) > _TABLE_COLUMNS:
            lines.append("")
        lines[-1] += f"{value}, "
    lines = [line.strip() for line in lines]
    return ("\n      ".join(["", *lines]) if len(lines) > 1 else lines[0]).rstrip(",")

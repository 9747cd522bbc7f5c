"""Small pieces of C++ text."""

from __future__ import annotations

from collections.abc import Iterable


def literal(value: float) -> str:
    """A number of the kernel's type, to the last bit."""
    return f"T({value!r})"


def table(scalar: str, values: Iterable[str], index: str = "n") -> str:
    """The body of a function that looks something up."""
    return f"static constexpr {scalar} values[] = {{{', '.join(values)}}}; return values[{index}];"

"""Passes: the rows of edge matrices whose sums over channels are kept in registers together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from eqaccel.codegen import Direction
from eqaccel.families.tensor_product.plan.model import EdgeMatrix, Element, Part, PlannedPath

Fits = Callable[[Sequence[Part]], bool]


def one_row(parts: Sequence[Part]) -> bool:
    """The rule for GPUs, where every channel has a lane and nothing is gained by more than a row at a time."""
    return len(parts) == 1 and len(parts[0].rows) == 1


def registers(direction: Direction, available: int) -> Fits:
    """A rule for CPUs: a pass is one loop over channels, so it takes as many rows as the vector registers allow.

    Args:
        direction: Any but forward, which has no passes.
        available: Vector registers that are not needed for intermediate results.
    """
    by_row, by_output = ((3, 2), (2, 1), (3, 2), (5, 3))[direction.order]

    def fits(parts: Sequence[Part]) -> bool:
        sums = direction.gradients * sum(len(part.elements) for part in parts)
        rows = {i for part in parts for i in part.rows}
        outputs = max(part.path.d3 for part in parts)
        return sums + by_row * len(rows) + by_output * outputs <= available

    return fits


def group(paths: Sequence[PlannedPath], matrices: Sequence[EdgeMatrix], fits: Fits) -> tuple[tuple[Part, ...], ...]:
    """Splits the paths of a block into passes, each as long as the rule allows and at least one row.

    Args:
        paths: Paths that read the same in1 block.
        matrices: The edge matrices of the plan.
        fits: Whether a pass may consist of these parts.

    Returns:
        The passes; together they hold every row of every path once, and a path without rows as one empty part.
    """
    passes: list[list[Part]] = []
    for path in paths:
        elements = matrices[path.matrix].elements
        whole = Part(path, elements)
        if passes and fits([*passes[-1], whole]):
            passes[-1].append(whole)
            continue
        passes.append([])
        for _, row in rows_of(elements):
            started = passes[-1][0].elements if passes[-1] else ()
            longer = Part(path, (*started, *row))
            if started and not fits([longer]):
                passes.append([Part(path, tuple(row))])
            else:
                passes[-1] = [longer]
        if not elements:
            passes[-1].append(whole)
    return tuple(map(tuple, passes))


def rows_of(elements: Sequence[Element]) -> list[tuple[int, list[Element]]]:
    """The elements by row i."""
    rows: dict[int, list[Element]] = {}
    for element in elements:
        rows.setdefault(element.i, []).append(element)
    return list(rows.items())

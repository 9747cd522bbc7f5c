"""Edge matrices: from CG tensors to the distinct linear forms of y that they are made of."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from eqaccel.families.tensor_product.plan.model import EdgeMatrix, Element
from eqaccel.families.tensor_product.spec import Path, TensorProductSpec


def edge_matrices(
    spec: TensorProductSpec, distinct: bool, by_entry: bool = False
) -> tuple[tuple[EdgeMatrix, ...], tuple[int, ...]]:
    """The distinct edge matrices of a spec, and the matrix of each path.

    Paths with the same degrees, in2 block and coefficient share a matrix, as the parity variants of NequIP models do.

    Args:
        spec: The tensor product.
        distinct: Elements that are equal up to sign share an entry, which saves a GPU registers and shared memory.
            The gradients of a CPU read an entry for each element instead: it comes with the multiply-add, broadcast
            from memory.
        by_entry: Elements that share an entry follow each other, so that it is read once and needs one register.

    Returns:
        The matrices, and for each path the position of its own.
    """
    matrices: list[EdgeMatrix] = []
    known: dict[tuple[int, int, int, int, float], int] = {}
    of_path: list[int] = []
    for path in spec.paths:
        key = (path.l1, path.l2, path.l3, path.y_offset, path.coefficient)
        if key not in known:
            known[key] = len(matrices)
            matrices.append(edge_matrix(path, distinct, by_entry))
        of_path.append(known[key])
    return tuple(matrices), tuple(of_path)


@lru_cache(maxsize=1024)  # plans of all directions, dtypes and machines ask for the same ones
def edge_matrix(path: Path, distinct: bool, by_entry: bool = False) -> EdgeMatrix:
    """The edge matrix of a path; see `edge_matrices` for the arguments."""
    cg = path.cg()
    entries: dict[tuple[tuple[int, float], ...], int] = {}
    forms: list[tuple[tuple[int, float], ...]] = []
    elements: list[Element] = []
    for i in range(cg.shape[0]):
        for k in range(cg.shape[2]):
            terms = [(path.y_offset + j, float(cg[i, j, k])) for j in np.flatnonzero(cg[i, :, k])]
            if not terms:
                continue
            sign = 1 if terms[0][1] > 0 or not distinct else -1
            form = tuple((int(j), sign * value) for j, value in terms)
            if form not in entries or not distinct:
                entries[form] = len(forms)
                forms.append(form)
            elements.append(Element(i, k, entries[form], sign))
    if by_entry:
        elements.sort(key=lambda element: element.entry)
    return EdgeMatrix(tuple(forms), tuple(elements))

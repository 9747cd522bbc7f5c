"""The payload of the kernels that find neighbours and add up forces: one text for CUDA and HIP."""

from __future__ import annotations

import functools

from eqaccel.codegen import SCALAR_BYTES, flatten_prelude, pack

NAME = "neighbors"
"""Of the family."""

_THREADS = 128  # of a GPU block: four warps


@functools.cache
def neighbors_payload() -> tuple[bytes, int]:
    """The payload of the kernels, and the integer key that names it; meta has `threads`, those of a block."""
    entries = {f"prelude/{backend}": neighbors_prelude(backend) for backend in ("cuda", "hip")}
    for scalar in SCALAR_BYTES:
        body = f"gpu/forward/{scalar}"
        entries |= {body: print_neighbors(), f"plan/{body}": explain()}
    return pack(NAME, {"threads": _THREADS}, entries)


def neighbors_prelude(backend: str) -> str:
    """The text in front of the body of a backend, which holds all that is computed."""
    return flatten_prelude("neighbors.h", backend, __package__)


def print_neighbors() -> str:
    """The kernels `eq_count_edges`, `eq_write_edges`, `eq_order_by_sender`, `eq_add_forces`, and those of pairs."""
    return "EQ_EXPORT_NEIGHBORS\n"


def explain() -> str:
    """How the kernels work, in words."""
    return f"neighbours within a cutoff\n  a warp looks at the candidates of one atom; blocks of {_THREADS} threads\n"

"""The payload of a radial network: kernels for NVIDIA's tensor cores."""

from __future__ import annotations

import functools

from eqaccel.codegen import Direction, flatten_prelude, pack
from eqaccel.families.radial_network.body import RESIDENT, THREADS, print_radial_network
from eqaccel.families.radial_network.spec import RadialNetworkSpec

NAME = "radial_network"
"""Of the family."""

DIRECTIONS = (Direction.FORWARD, Direction.BACKWARD)
"""The gradient with respect to x alone; other derivatives are composed."""

ROWS = 16
"""That a warp takes through the network at a time."""


@functools.lru_cache(maxsize=64)
def radial_network_payload(spec: RadialNetworkSpec) -> tuple[bytes, int]:
    """The payload of a radial network, and the integer key that names it.

    `csrc/runtime/families.cpp` says which architectures have the kernels. Meta has `row_threads`, the threads of a GPU
    block, `most_warps/<direction>`, those of a multiprocessor, and `warp_rows`, the rows that a warp takes at a time.
    """
    entries = {"prelude/cuda": radial_network_prelude("cuda")}
    body = print_radial_network(spec)
    for direction in DIRECTIONS:
        name = f"gpu/{direction.value}/float32"
        entries |= {name: body, f"plan/{name}": explain(spec, direction)}
    dims = {"x_dim": spec.widths[0], "y_dim": 0, "w_dim": spec.num_weights, "z_dim": spec.widths[-1]}
    launch = {"row_threads": THREADS, "warp_rows": ROWS}
    launch |= {f"most_warps/{direction.value}": RESIDENT[direction] * THREADS // 32 for direction in DIRECTIONS}
    return pack(NAME, {**dims, "shared_weights": 1, **launch}, entries)


def radial_network_prelude(backend: str) -> str:
    """The text in front of every body; of GPUs those of CUDA have one."""
    return flatten_prelude("gpu_radial_network.h", backend, __package__)


def explain(spec: RadialNetworkSpec, direction: Direction) -> str:
    """How the kernel of a direction works, in words."""
    widths = " to ".join(map(str, spec.widths))
    return (
        f"{direction.value} of layers with SiLU, {widths} columns, three products of half precision by mma.sync\n"
        f"  {ROWS} rows a warp, whose features stay in registers; weights in shared memory, {spec.shared_bytes} bytes; "
        f"blocks of {THREADS} threads\n"
    )

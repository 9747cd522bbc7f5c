"""The payload of matrix products: a kernel for CPUs, one for compute capability 9.0, and one for other tensor cores."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from eqaccel.codegen import check, flatten_prelude, pack
from eqaccel.families.matrix_product.body import DEPTH, GpuBody, print_host_product
from eqaccel.families.matrix_product.mma import mma_body
from eqaccel.families.matrix_product.spec import MatrixProductSpec
from eqaccel.families.matrix_product.wgmma import wgmma_body
from eqaccel.targets import TARGETS, Target

NAME = "matrix_product"
"""Of the family."""

_GPU_BODIES: dict[str, Callable[[MatrixProductSpec], GpuBody]] = {
    "tuned/sm_90a/forward/float32": wgmma_body,
    "gpu/forward/float32": mma_body,
}
"""By their entries."""

_CHECKED_COLUMNS = 75
"""Columns of the product that a CPU kernel is checked with: panels of any SIMD width, and a part of one."""


@functools.cache
def matrix_payload(spec: MatrixProductSpec = MatrixProductSpec()) -> tuple[bytes, int]:  # noqa: B008 (frozen)
    """The payload of the kernels, and the integer key that names it.

    `csrc/runtime/matrix_product.cpp` says which architecture gets which of the entries `tuned/sm_90a/forward/float32`
    and `gpu/forward/float32`. Meta has `products`, those of half precision that make one in float32; what a block may
    take, `shared_bytes/<architecture>`; and for each of these entries the numbers of its launches: `<entry>/depth` and
    `<entry>/threads`; of `<entry>/kernels` kernels, `eq_product_<n>`, how they divide the output: `<entry>/<n>/width`,
    `<entry>/<n>/height`, `<entry>/<n>/kept_terms` (of rows of A that a block keeps; 0 where it keeps none),
    `<entry>/<n>/adds_rows` (1 where rows are sums of two rows), `<entry>/<n>/stages` and `<entry>/<n>/shared_bytes`.
    The CPU kernel computes z = x w, where operands have any sizes; in meta and the self-check stand those of the
    latter.
    """
    terms = check.PROBLEM["batch_rows"]  # as many as w has rows
    numbers = {"products": spec.products, "shared_bytes/sm_90a": TARGETS["sm_90"].shared_bytes}
    numbers |= {f"shared_bytes/{target.name}": target.shared_bytes for target in TARGETS.values() if target.is_gpu}
    numbers |= {"x_dim": terms, "y_dim": 0, "w_dim": _CHECKED_COLUMNS, "z_dim": _CHECKED_COLUMNS}
    entries = {f"prelude/{backend}": matrix_prelude(backend) for backend in ("cpu", "cuda")}
    entries |= {"cpu/forward": print_host_product(), "plan/cpu/forward": _explain_host()}
    for entry, make in _GPU_BODIES.items():
        body = make(spec)
        entries |= {entry: body.text, f"plan/{entry}": _explain(spec, body)}
        numbers |= {f"{entry}/depth": DEPTH, f"{entry}/threads": body.threads, f"{entry}/kernels": len(body.tilings)}
        for n, tiling in enumerate(body.tilings):
            numbers |= {f"{entry}/{n}/{name}": int(number) for name, number in vars(tiling).items()}
    entries["check/blocks"] = f"x {terms} 1\nw {_CHECKED_COLUMNS} 1\nz {_CHECKED_COLUMNS} 1\n"
    entries["check/forward"] = _checksums(terms)
    return pack(NAME, numbers, entries)


def matrix_prelude(backend: str) -> str:
    """The text in front of the body; of GPUs those of CUDA have one."""
    return flatten_prelude("cpu_matrix_product.h" if backend == "cpu" else "matrix_product.h", backend, __package__)


def body_of(spec: MatrixProductSpec, target: Target) -> str:
    """The text of the kernel of a target."""
    return _gpu_body(spec, target).text if target.is_gpu else print_host_product()


def explain(spec: MatrixProductSpec, target: Target) -> str:
    """How the kernel of a target works, in words."""
    return _explain(spec, _gpu_body(spec, target)) if target.is_gpu else _explain_host()


def _gpu_body(spec: MatrixProductSpec, target: Target) -> GpuBody:
    return wgmma_body(spec) if target.name == "sm_90" else mma_body(spec)


def _explain(spec: MatrixProductSpec, body: GpuBody) -> str:
    widths = sorted({tiling.width for tiling in body.tilings})
    stages = sorted({tiling.stages for tiling in body.tilings})
    plural = "products" if spec.products > 1 else "product"
    return (
        f"product of matrices, 32-bit, {spec.products} {plural} of half precision by {body.instruction}\n"
        f"  tiles of {', '.join(map(str, widths))} columns, "
        f"{' or '.join(map(str, stages))} stages of {DEPTH} terms, blocks of {body.threads} threads\n"
    )


def _explain_host() -> str:
    return "product of matrices\n  columns packed into panels of two SIMD vectors, as many rows as registers hold\n"


def _checksums(terms: int) -> str:
    """What the self-check (`codegen.check`) compares a product with."""
    x = check.numbers("x", check.PROBLEM["batch_rows"], terms)
    w = check.numbers("w", terms, _CHECKED_COLUMNS)
    size = float(np.sqrt(((np.abs(x) @ np.abs(w)) ** 2).sum()))
    a, b = (float(products.sum()) for products in check.projections(x @ w))
    return f"z {size:.4g} {a!r} {b!r}\n"

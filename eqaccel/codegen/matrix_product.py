"""The kernel of plain matrix products, which radial networks consist of: one text for all shapes, for sm_90a only."""

from __future__ import annotations

import functools

from eqaccel.codegen.payload import abi_number, pack, read_prelude

WIDTHS = (64, 112, 128)
"""Columns of the tiles of an output; the runtime takes what wastes least."""


@functools.cache
def matrix_payload() -> tuple[bytes, int]:
    """The payload of the kernel, and the integer key that names it; see `payload`.

    Entry `gpu/forward/float32` compiles for the architecture sm_90a, and meta `widths` has a bit for each width in
    eights. The kernels are `eq_pack` and `eq_product_<width>`.
    """
    prelude = read_prelude("abi.h") + read_prelude("cuda.h")
    kernels = "".join(_multiply_add(width) for width in WIDTHS) + read_prelude("matrix_product.h")
    kernels += "".join(_kernel(width) for width in WIDTHS)
    meta = f"abi={abi_number()}\nwidths={sum(1 << width // 8 for width in WIDTHS)}\n"
    return pack({"prelude/cuda": prelude, "gpu/forward/float32": kernels, "meta": meta})


def _multiply_add(width: int) -> str:
    """The instruction for one width: it names all of its registers."""
    sums = width // 2
    registers = ", ".join(f"%{n}" for n in range(sums))
    factor = ", ".join(f"%{sums + n}" for n in range(4))
    outputs = ", ".join(f'"+f"(sum[{n}])' for n in range(sums))
    shape = f"m64n{width}k8"
    return f"""
// sum = a b, or sum + a b if it is to be kept; a is 64 x 8, b is 8 x {width}.
EQ_FN void multiply_add(float (&sum)[{sums}], const unsigned (&a)[4], unsigned long long b, bool keep) {{
  asm volatile(
      "{{\\n.reg .pred keep;\\nsetp.ne.b32 keep, %{sums + 5}, 0;\\n"
      "wgmma.mma_async.sync.aligned.{shape}.f32.tf32.tf32 {{{registers}}}, {{{factor}}}, %{sums + 4}, keep, 1, 1;\\n}}"
      : {outputs}
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)keep));
}}
"""


def _kernel(width: int) -> str:
    return f"""
EQ_KERNEL void __launch_bounds__(block_threads, 1) eq_product_{width}(
    const float* a, const float* packed, float* c, long long rows, int columns, int terms) {{
  product<{width}>(a, packed, c, rows, columns, terms);
}}
"""

"""The kernel of plain matrix products, which radial networks consist of: one text for all shapes, for sm_90a only."""

from __future__ import annotations

import functools

from eqaccel.codegen.payload import abi_number, pack
from eqaccel.codegen.preludes import flatten_prelude

WIDTHS = (64, 112, 128)
"""Columns of the tiles of an output; the runtime takes what wastes least."""
_HEIGHT = 128  # rows of a tile
_DEPTH, _STAGES = 32, 4  # terms of a stage; stages that are in shared memory at a time
_THREADS = 256
_A_STRIDE = _DEPTH + 8  # floats of a row of A in shared memory: no two lanes meet in a bank


@functools.cache
def matrix_payload() -> tuple[bytes, int]:
    """The payload of the kernel, and the integer key that names it; see `payload`.

    Entry `gpu/forward/float32` compiles for the architecture sm_90a; the kernels are `eq_pack` and
    `eq_product_<width>`. Meta has the numbers of their launches: `height`, `depth` and `threads`, of `widths` tiles
    `<n>/width` and `<n>/shared_bytes`.
    """
    numbers = {"abi": abi_number(), "height": _HEIGHT, "depth": _DEPTH, "threads": _THREADS, "widths": len(WIDTHS)}
    for n, width in enumerate(WIDTHS):
        numbers[f"{n}/width"] = width
        numbers[f"{n}/shared_bytes"] = 4 * _STAGES * (_HEIGHT * _A_STRIDE + 2 * _DEPTH * width)
    meta = "".join(f"{name}={number}\n" for name, number in numbers.items())
    plan = (
        f"product of matrices, 32-bit\n  tiles of {_HEIGHT} rows and {', '.join(map(str, WIDTHS))} columns, "
        f"{_STAGES} stages of {_DEPTH} terms, blocks of {_THREADS} threads\n"
    )
    entries = {"gpu/forward/float32": _print_body(), "plan/gpu/forward/float32": plan, "meta": meta}
    return pack({"prelude/cuda": flatten_prelude("matrix_product.h", "cuda"), **entries})


def _print_body() -> str:
    """The struct that `matrix_product.h` takes its numbers and the instruction from, and the kernels."""
    instructions = "".join(_multiply_add(width) for width in WIDTHS)
    kernels = "".join(f"EQ_EXPORT_PRODUCT(eq_product_{width}, Problem, {width})\n" for width in WIDTHS)
    return f"""namespace {{
struct Problem {{
  static constexpr int height = {_HEIGHT}, depth = {_DEPTH}, stages = {_STAGES};
  static constexpr int block_threads = {_THREADS}, a_stride = {_A_STRIDE};
{instructions}}};
}}  // namespace
EQ_EXPORT_PACK(Problem)
{kernels}"""


def _multiply_add(width: int) -> str:
    """The instruction for one width: it names all of its registers."""
    sums = width // 2
    registers = ", ".join(f"%{n}" for n in range(sums))
    factor = ", ".join(f"%{sums + n}" for n in range(4))
    outputs = ", ".join(f'"+f"(sum[{n}])' for n in range(sums))
    shape = f"wgmma.mma_async.sync.aligned.m64n{width}k8.f32.tf32.tf32"
    return f"""
  // sum = a b, or sum + a b if it is to be kept; a is 64 x 8, b is 8 x {width}.
  static EQ_FN void multiply_add(float (&sum)[{sums}], const unsigned (&a)[4], unsigned long long b, bool keep) {{
    asm volatile(
        "{{\\n.reg .pred keep;\\nsetp.ne.b32 keep, %{sums + 5}, 0;\\n"
        "{shape} {{{registers}}}, {{{factor}}}, %{sums + 4}, keep, 1, 1;\\n}}"
        : {outputs}
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)keep));
  }}
"""

"""The body for compute capability 9.0, on `wgmma_product.h`."""

from __future__ import annotations

import functools

from eqaccel.families.matrix_product.body import DEPTH, GpuBody, Tiling, print_numbers
from eqaccel.families.matrix_product.spec import MatrixProductSpec

_WIDTHS = (64, 112, 128)
"""Columns of the tiles of an output; the runtime takes what wastes least.

128 columns take 128 registers of a thread for sums and what is added to them, and two stages of A take 64 more: of 255,
as many as fit a multiple of 64. The others are for radial networks: 64 for hidden layers of 64, and 112 for outputs of
320, 336 or 1312 columns, which fill such tiles better.
"""
_STAGES = 4
_THREADS = 256
_A_STRIDE = DEPTH + 8  # floats of a row of A in shared memory: no two lanes meet in a bank

_SHAPES = (
    *((width, 1, True) for width in _WIDTHS),
    *((width, 1, False) for width in _WIDTHS),
    (64, 2, False),
)
"""Of each kernel its width, its passes over a stage of B, each for other rows, and whether all terms of a block's
columns of B stay in shared memory. Tall tiles of more columns do not fit into registers; the runtime takes them for
many terms."""


@functools.cache
def wgmma_body(spec: MatrixProductSpec) -> GpuBody:
    """The body of a spec."""
    numbers = print_numbers(parts=spec.parts, depth=DEPTH, stages=_STAGES, block_threads=_THREADS, a_stride=_A_STRIDE)
    instructions = "".join(_multiply_add(width) for width in _WIDTHS)
    kernels = "".join(
        f"EQ_EXPORT_WGMMA_PRODUCT(eq_product_{n}, Problem, {width}, {passes}, {keeps_b:d})\n"
        for n, (width, passes, keeps_b) in enumerate(_SHAPES)
    )
    text = f"""namespace {{
struct Problem {{
{numbers}{instructions}}};
}}  // namespace
EQ_EXPORT_PACK(Problem, WgmmaOrder)
{kernels}"""
    tilings = tuple(_tiling(spec, *shape) for shape in _SHAPES)
    return GpuBody(text, _THREADS, tilings, _STAGES, "wgmma")


def _tiling(spec: MatrixProductSpec, width: int, passes: int, keeps_b: bool) -> Tiling:
    height = _THREADS // 2 * passes
    floats = _STAGES * (height * _A_STRIDE + spec.parts * DEPTH * width)
    return Tiling(width, height, _STAGES * DEPTH if keeps_b else 0, 4 * floats)


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

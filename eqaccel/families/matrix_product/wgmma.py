"""The body for compute capability 9.0, on `wgmma_product.h`."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from eqaccel.families.matrix_product.body import DEPTH, GpuBody, Tiling, print_numbers
from eqaccel.families.matrix_product.spec import MatrixProductSpec
from eqaccel.targets import TARGETS

_WIDTHS = (64, 112, 128)
"""Columns of the tiles of an output; the runtime takes what wastes least.

128 columns take 128 registers of a thread for sums and what is added to them, and two stages of A take 64 more: of 255,
as many as fit a multiple of 64. The others are for radial networks: 64 for hidden layers of 64, and 112 for outputs of
320, 336 or 1312 columns, which fill such tiles better.
"""
_MOST_STAGES = 4
_THREADS = 256
_A_STRIDE = DEPTH + 8  # floats of a row of A in shared memory: no two lanes meet in a bank


@dataclass(frozen=True)
class _Shape:
    """What a kernel makes at a time.

    Attributes:
        width: Columns.
        passes: Over a stage of B, each for other rows.
        keeps_b: Whether all terms of a block's columns of B stay in shared memory.
        adds_rows: Whether rows of the left factor are sums of two rows of A, which are in shared memory both.
    """

    width: int
    passes: int = 1
    keeps_b: bool = False
    adds_rows: bool = False

    def tiling(self, spec: MatrixProductSpec) -> Tiling:
        """Of an output, with as many stages as there is room for."""
        height = _THREADS // 2 * self.passes
        rows = height * (2 if self.adds_rows else 1)
        stage_bytes = 4 * (rows * _A_STRIDE + spec.parts * DEPTH * self.width)
        stages = min(_MOST_STAGES, TARGETS["sm_90"].shared_bytes // stage_bytes)
        kept_terms = stages * DEPTH if self.keeps_b else 0
        return Tiling(self.width, height, stages, stages * stage_bytes, kept_terms, self.adds_rows)

    def export(self, number: int, spec: MatrixProductSpec) -> str:
        """The text that makes a kernel of it."""
        numbers = (self.width, self.tiling(spec).stages, self.passes, int(self.keeps_b), int(self.adds_rows))
        return f"EQ_EXPORT_WGMMA_PRODUCT(eq_product_{number}, Problem, {', '.join(map(str, numbers))})\n"


_SHAPES = (
    *(_Shape(width, keeps_b=True) for width in _WIDTHS),
    *(_Shape(width) for width in _WIDTHS),
    _Shape(64, passes=2),
    _Shape(64, adds_rows=True),
    _Shape(128, adds_rows=True),
)
"""Of all kernels. Tall tiles of more columns do not fit into registers; the runtime takes them for many terms. Products
that add rows have as many columns as hidden layers have: 64 or 128."""


@functools.cache
def wgmma_body(spec: MatrixProductSpec) -> GpuBody:
    """The body of a spec."""
    numbers = print_numbers(parts=spec.parts, depth=DEPTH, block_threads=_THREADS, a_stride=_A_STRIDE)
    instructions = "".join(_multiply_add(width) for width in _WIDTHS)
    kernels = "".join(shape.export(number, spec) for number, shape in enumerate(_SHAPES))
    text = f"""namespace {{
struct Problem {{
{numbers}{instructions}}};
}}  // namespace
EQ_EXPORT_PACK(Problem, WgmmaOrder)
{kernels}"""
    return GpuBody(text, _THREADS, tuple(shape.tiling(spec) for shape in _SHAPES), "wgmma")


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

"""The body for compute capability 9.0, on `wgmma_product.h`."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from eqaccel.families.matrix_product.body import DEPTH, GpuBody, Tiling, print_numbers
from eqaccel.families.matrix_product.spec import MatrixProductSpec
from eqaccel.targets import TARGETS

_WIDTHS = (64, 112, 128)
"""Columns of the tiles of an output; the runtime takes what wastes least.

128 columns take 128 of 240 registers of a thread, for sums and what is added to them. The others are for radial
networks: 64 for hidden layers of 64, and 112 for outputs of 320, 336 or 1312 columns, which fill such tiles better.
"""
_MOST_STAGES = 12
"""B of a tile of 128 columns and 128 terms is four of them."""
_THREADS = 384
"""Two warpgroups that multiply, and one that brings B."""
_HEIGHT = 128  # rows that a block makes at a time
_BARRIER_BYTES = 16  # of a stage of B


@dataclass(frozen=True)
class _Shape:
    """What a kernel makes at a time.

    Attributes:
        width: Columns.
        kept_terms: Of its rows of A, which a block keeps in registers for several tiles of columns; 0 for none.
        adds_rows: Whether rows of the left factor are sums of two rows of A, which are in shared memory both.
    """

    width: int
    kept_terms: int = 0
    adds_rows: bool = False

    def tiling(self, spec: MatrixProductSpec) -> Tiling:
        """Of an output, with as many stages as there is room for."""
        a_bytes = 4 * DEPTH * _HEIGHT * (2 if self.adds_rows else 1)  # of a stage
        b_bytes = 2 * DEPTH * spec.parts * self.width + _BARRIER_BYTES
        kept_bytes = a_bytes * (self.kept_terms // DEPTH)
        stage_bytes = b_bytes if self.kept_terms else a_bytes + b_bytes
        stages = min(_MOST_STAGES, (TARGETS["sm_90"].shared_bytes - kept_bytes) // stage_bytes)
        shared_bytes = kept_bytes + stages * stage_bytes
        return Tiling(self.width, _HEIGHT, stages, shared_bytes, self.kept_terms, self.adds_rows)

    def export(self, number: int, spec: MatrixProductSpec) -> str:
        """The text that makes a kernel of it."""
        tiling = self.tiling(spec)
        numbers = (tiling.width, tiling.stages, tiling.kept_terms, int(tiling.adds_rows))
        return f"EQ_EXPORT_WGMMA_PRODUCT(eq_product_{number}, Problem, {', '.join(map(str, numbers))})\n"


_SHAPES = (
    *(_Shape(width) for width in _WIDTHS),
    *(_Shape(64, kept_terms=terms) for terms in (64, 128)),
    *(_Shape(width, adds_rows=True) for width in (64, 128)),
)
"""Of all kernels. Hidden layers have 64 or 128 channels, which are the terms of products that end a radial network, and
the columns of those that add rows. Where rows are kept, a thread has two sets of sums of 64 columns, so that tensor
cores multiply a stage while the one before is added up."""


@functools.cache
def wgmma_body(spec: MatrixProductSpec) -> GpuBody:
    """The body of a spec."""
    numbers = print_numbers(parts=spec.parts, depth=DEPTH, block_threads=_THREADS)
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
    shape = f"wgmma.mma_async.sync.aligned.m64n{width}k16.f32.f16.f16"
    return f"""
  // sum = a b, or sum + a b if it is to be kept; a is 64 x 16, b is 16 x {width}.
  static EQ_FN void multiply_add(float (&sum)[{sums}], const unsigned (&a)[4], unsigned long long b, bool keep) {{
    asm volatile(
        "{{\\n.reg .pred keep;\\nsetp.ne.b32 keep, %{sums + 5}, 0;\\n"
        "{shape} {{{registers}}}, {{{factor}}}, %{sums + 4}, keep, 1, 1, 0;\\n}}"
        : {outputs}
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)keep));
  }}
"""

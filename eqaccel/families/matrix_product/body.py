"""The kernels of plain matrix products, which radial networks consist of: one text for all shapes."""

from __future__ import annotations

from dataclasses import dataclass

WIDTHS = (64, 112, 128)
"""Columns of the tiles of an output; the runtime takes what wastes least.

128 columns take 128 registers of a thread for sums and what is added to them, and two stages of A take 64 more: of 255,
as many as fit a multiple of 64. The others are for radial networks: 64 for hidden layers of 64, and 112 for outputs of
320, 336 or 1312 columns, which fill such tiles better.
"""
DEPTH, STAGES = 32, 4
"""Terms of a stage; stages that are in shared memory at a time, where there is room for them."""
THREADS = 256
"""Of a block."""
_A_STRIDE = DEPTH + 8  # floats of a row of A in shared memory: no two lanes meet in a bank


@dataclass(frozen=True)
class Tiling:
    """How a kernel divides the output; `matrix_product.h` says what its ways are."""

    width: int
    """Columns of a tile."""
    passes: int = 1
    """Over a stage of B, each for other rows: as many as half the threads of a block."""
    keeps_b: bool = False
    """All terms of a block's columns of B stay in shared memory."""
    adds_rows: bool = False
    """Rows of the left factor are sums of two rows of A, which are in shared memory both."""
    stages: int = STAGES
    """Stages that are in shared memory at a time."""

    @property
    def height(self) -> int:
        """Rows that a block has at a time."""
        return THREADS // 2 * self.passes

    @property
    def kept_terms(self) -> int:
        """Terms of B that a block can keep."""
        return self.stages * DEPTH if self.keeps_b else 0

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        rows = self.height * (2 if self.adds_rows else 1)
        return 4 * self.stages * (rows * _A_STRIDE + 2 * DEPTH * self.width)


TILINGS = (
    *(Tiling(width, keeps_b=True) for width in WIDTHS),
    *(Tiling(width) for width in WIDTHS),
    Tiling(64, passes=2),
    Tiling(64, adds_rows=True),
    Tiling(128, adds_rows=True, stages=3),
)
"""Of all kernels. Tall tiles of more columns do not fit into registers; the runtime takes them for many terms.

Products that add rows have as many columns as hidden layers have: 64 or 128. Three stages are as many as fit with 128.
"""


def print_host_product() -> str:
    """The body on a CPU; `cpu_matrix_product.h` has it all."""
    return "EQ_EXPORT_PRODUCT()\n"


def print_products() -> str:
    """The body on a GPU: the struct that `matrix_product.h` takes its numbers and instruction from, and the kernels.

    These are `eq_pack`, which prepares B, and `eq_product_<n>` for entry n of `TILINGS`.
    """
    instructions = "".join(_multiply_add(width) for width in WIDTHS)
    kernels = "".join(
        f"EQ_EXPORT_PRODUCT(eq_product_{n}, Problem, {t.width}, {t.stages}, {t.passes}, {t.keeps_b:d}, "
        f"{t.adds_rows:d})\n"
        for n, t in enumerate(TILINGS)
    )
    return f"""namespace {{
struct Problem {{
  static constexpr int depth = {DEPTH}, block_threads = {THREADS}, a_stride = {_A_STRIDE};
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

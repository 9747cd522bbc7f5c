"""The kernels of plain matrix products, which radial networks consist of: one text for all shapes."""

from __future__ import annotations

from dataclasses import dataclass

DEPTH = 32
"""Terms of a stage on a GPU: as many as tensor cores add up before float32 takes over."""


@dataclass(frozen=True)
class Tiling:
    """How a kernel for GPUs divides the output.

    Attributes:
        width: Columns that a block has at a time.
        height: Rows that it has at a time.
        stages: Parts of both factors that are in shared memory at a time.
        shared_bytes: Shared memory that it takes.
        kept_terms: Of its rows of A, which it keeps for several tiles of columns; 0 where it keeps none.
        adds_rows: Whether rows of the left factor are sums of two rows of A.
    """

    width: int
    height: int
    stages: int
    shared_bytes: int
    kept_terms: int = 0
    adds_rows: bool = False


@dataclass(frozen=True)
class GpuBody:
    """A body for GPUs: kernels that differ in their tiling, and one that prepares B for them.

    Attributes:
        text: The body: `eq_pack`, which prepares B, and `eq_product_<n>` for entry n of `tilings`.
        threads: Of a block.
        tilings: Of all kernels; the runtime takes one of them for a shape.
        instruction: What multiplies, in words.
    """

    text: str
    threads: int
    tilings: tuple[Tiling, ...]
    instruction: str

    @property
    def shared_bytes(self) -> int:
        """Shared memory that a block of any of its kernels takes at most."""
        return max(tiling.shared_bytes for tiling in self.tilings)


def print_host_product() -> str:
    """The body on a CPU; `cpu_matrix_product.h` has it all."""
    return "EQ_EXPORT_PRODUCT()\n"


def print_numbers(**numbers: int) -> str:
    """The constants of the struct `Problem`, from which preludes take the numbers of a body."""
    return "".join(f"  static constexpr int {name} = {number};\n" for name, number in numbers.items())

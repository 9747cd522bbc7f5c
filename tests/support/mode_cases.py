"""Tensor products of every connection mode: a few by hand, and random ones."""

from __future__ import annotations

import random
from typing import Any

from eqaccel import Irreps

Case = tuple[str, str, str, list[tuple[Any, ...]]]
"""irreps_in1, irreps_in2, irreps_out, instructions."""

MODES = ("uvw", "uvu", "uvv", "uuw", "uuu", "uvuv", "uvu<v", "u<vw")

CASES: dict[str, Case] = {
    # Every mode, with weights and as far as it goes without, several on one block of the output.
    "modes": (
        "3x1o+3x0e+2x1o",
        "3x1o+2x0e+3x1o",
        "4x2e+3x1o+2x1o+3x1e+6x1o+3x1e+5x0e+1x0e+9x2e",
        [
            (0, 0, 0, "uvw", True),
            (0, 1, 1, "uvu", True, 0.5),
            (0, 1, 1, "uvu", False),
            (1, 0, 1, "uvv", True),
            (1, 0, 1, "uvv", False, 2.0),
            (0, 0, 0, "uuw", True),
            (0, 0, 7, "uuw", False),
            (0, 0, 3, "uuu", True),
            (0, 2, 3, "uuu", False),
            (0, 1, 4, "uvuv", True),
            (0, 0, 8, "uvuv", False),
            (0, 0, 5, "uvu<v", True),
            (0, 2, 5, "uvu<v", False, 3.0),
            (0, 0, 6, "u<vw", True),
            (2, 1, 2, "uvu", True),
        ],
    ),
    # More channels than a SIMD vector or a warp has, and not a multiple of them.
    "wide": (
        "40x0e+3x1o",
        "2x0e+35x1o",
        "37x0e+70x1o+40x1o+35x1o+35x1e",
        [
            (0, 0, 0, "uvw", True),
            (1, 1, 0, "uvw", True),
            (1, 0, 1, "uvw", True),
            (0, 1, 2, "uvu", True),
            (0, 1, 3, "uvv", True),
            (1, 1, 4, "uvv", False),
        ],
    ),
    # So many weights that GPUs copy them in chunks: of a part of a tile, of some tiles, of two paths that share code,
    # of few channels, an even or an odd number, in rows that begin anywhere among 16 bytes, and beside a path whose
    # weights are no matrix.
    "chunks": (
        "33x0e+5x1o+5x1o",
        "2x1o+1x0e",
        "7x1o+21x0e+33x0e+8x1e",
        [
            (0, 0, 0, "uvw", True),
            (0, 1, 1, "uvw", True),
            (1, 0, 1, "uvw", True),
            (2, 0, 1, "uvw", True),
            (2, 1, 0, "uvw", True),
            (1, 1, 0, "uvw", True),
            (1, 0, 3, "uvw", True),
            (0, 1, 2, "uvu", True),
        ],
    ),
    # Chunks of which a lane of a GPU mixes whole pairs, into few channels of so many components that a tile is full.
    "few channels": (
        "48x3o+40x0e",
        "1x0e",
        "8x3o+33x0e+1x3o",
        [(0, 0, 0, "uvw", True), (1, 0, 1, "uvw", True), (0, 0, 2, "uvw", True)],
    ),
    # All pairs are channels of the output: each element of it is stored once; or a path has few pairs; or some elements
    # are left, and others have two paths.
    "own channels": (
        "9x1o+5x0e",
        "7x1o+2x0e+9x1o",
        "63x1e+18x1o+36x2e+9x0e+10x0e",
        [
            (0, 0, 0, "uvuv", True),
            (0, 1, 1, "uvuv", False),
            (0, 2, 2, "uvu<v", True, 0.5),
            (0, 2, 3, "uuu", True),
            (1, 1, 4, "uvuv", False, 2.0),
        ],
    ),
    "few own channels": (
        "3x1o+2x0e",
        "3x1o+1x2e",
        "3x0e+6x1o+3x1o",
        [(0, 0, 0, "uuu", True), (1, 0, 1, "uvuv", True), (0, 1, 2, "uvuv", False)],
    ),
    "shared own channels": (
        "33x1o+2x0e",
        "33x1o+40x0e",
        "33x0e+80x0e+2x0e+33x2e",
        [(0, 0, 0, "uuu", True), (0, 0, 0, "uuu", False), (1, 1, 1, "uvuv", True), (0, 0, 3, "uuu", False)],
    ),
    "degrees": (
        "2x3o+1x8e",
        "2x2e+1x3o",
        "2x5o+2x1o+1x11o",
        [(0, 0, 0, "uvu", True), (0, 0, 1, "uuu", True), (1, 1, 2, "uvu", True)],
    ),
    "none left": (
        "0x1o+2x0e+1x0e",
        "2x1o+1x0e",
        "3x1e+0x0e+0x0e",
        [(0, 0, 0, "uvw", True), (1, 1, 1, "uvw", True), (2, 1, 2, "uvu<v", True)],
    ),
}


def random_case(seed: int) -> Case:
    """A product whose modes, multiplicities, degrees, parities and weights are drawn."""
    draw = random.Random(seed)
    sides = [[(draw.randint(1, 5), draw.randint(0, 2), draw.choice("eo")) for _ in range(3)] for _ in range(2)]
    # Modes that pair equal channels need some.
    sides[1][0] = (sides[0][0][0], *sides[1][0][1:])
    first, second = (Irreps("+".join(f"{mul}x{degree}{p}" for mul, degree, p in side)) for side in sides)
    out, instructions = [], []
    for i, block1 in enumerate(first):
        for j, block2 in enumerate(second):
            mode = draw.choice(
                [mode for mode in MODES if block1.mul == block2.mul or (mode[:2] == "uv" and "<" not in mode)]
            )
            pairs = block1.mul * (block1.mul - 1) // 2 if "<" in mode else block1.mul * block2.mul
            weighted = draw.random() < 0.7 or mode in ("uvw", "u<vw")
            muls = {"uvu": block1.mul, "uvv": block2.mul, "uuu": block1.mul, "uvuv": pairs, "uvu<v": pairs}
            mul = muls.get(mode, draw.randint(1, 6) if weighted else 1)
            ir = draw.choice(list(block1.ir * block2.ir))
            if mul == 0:
                continue
            known = [n for n, block in enumerate(out) if block == (mul, ir)]
            if not known:
                out.append((mul, ir))
            k = known[0] if known else len(out) - 1
            instructions.append((i, j, k, mode, weighted, draw.choice([1.0, 0.5, 2.0])))
    return str(first), str(second), str(Irreps(out)), instructions


def random_options(seed: str) -> dict[str, str]:
    """Normalisations, drawn."""
    draw = random.Random(seed)
    names = {"irrep_normalization": ("component", "norm", "none"), "path_normalization": ("element", "path", "none")}
    return {name: draw.choice(values) for name, values in names.items()}

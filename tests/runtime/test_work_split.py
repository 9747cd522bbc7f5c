"""How many edges a GPU block gets: enough blocks for all of a device, and no more rounds over it than needed."""

from __future__ import annotations

from pathlib import Path

import pytest
from folders import ROOT, SUPPORT
from hosts import compile_cpp, run

from eqaccel.codegen import preludes

H200 = 132 * 12
"""Blocks of one warp that the device of the measurements holds."""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of cpp_host/work_split.cpp."""
    folder = tmp_path_factory.mktemp("split")
    includes = [f"-I{ROOT / 'csrc/runtime'}", f"-I{Path(preludes.__file__).parent}"]
    compile_cpp("-std=c++20", "-O0", *includes, SUPPORT / "cpp_host/work_split.cpp", "-o", "split", folder=folder)
    return folder / "split"


def split(
    program: Path, edges: int, rows: int = 0, *, warps: int = 1, held: int = 8, streams: bool = False
) -> list[float]:
    """Edges of a block, and the number of blocks."""
    (found,) = run(program, *map(str, (H200, warps, held, int(streams), edges, rows)))
    return found


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("held", [1, 2, 8])
@pytest.mark.parametrize("edges", [0, 1, 64, H200, H200 + 1, 4000, 8000, 12671])
def test_a_batch_that_leaves_room_takes_one_round(program: Path, edges: int, held: int, streams: bool) -> None:
    """A warp that takes several edges at a time needs little longer than for one."""
    size, blocks = split(program, edges, held=held, streams=streams)
    if edges <= H200 * held:
        assert size <= held
        assert blocks <= H200
    assert blocks >= min(edges, H200) / 2


@pytest.mark.parametrize("edges", [64, 4000])
def test_blocks_of_several_warps_take_an_edge_of_a_small_batch(program: Path, edges: int) -> None:
    assert split(program, edges, warps=4) == [1, edges]


@pytest.mark.parametrize("held", [2, 4])
@pytest.mark.parametrize("rows", [20, 61, 160])
def test_warps_share_a_small_graph(program: Path, rows: int, held: int) -> None:
    edges = 60 * rows
    size, blocks = split(program, edges, rows, held=held)
    assert size >= held
    assert blocks >= min(edges / held, H200) / 2


def test_blocks_of_several_warps_share_a_small_graph(program: Path) -> None:
    assert split(program, 1200, 20, warps=4) == [16, 75]

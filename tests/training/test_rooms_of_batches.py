"""Sizes of memory for batches, and what fills the memory behind a batch."""

from __future__ import annotations

import pytest
import torch

from eqaccel.patches.batch import Batch, Extent, Field, PaddedBatch, blank_edges, blank_positions, num_blank

CUTOFF = 4.0


@pytest.mark.parametrize("nodes", [0, 1, 7, 8, 63, 500, 512, 5000, 70_001])
@pytest.mark.parametrize("edges", [0, 1, 100, 65_536])
def test_there_is_room_and_not_too_much(nodes: int, edges: int) -> None:
    extent = Extent(nodes, edges, 3)
    room = extent.grown()
    assert extent.fits(room)
    assert not room.fits(room)
    assert room.edges <= max(edges * 17 / 16, 1)
    assert room.nodes <= (nodes + 1 + num_blank(room.nodes)) * 17 / 16 + 1
    assert room.structures == 4


def test_blank_atoms_are_out_of_reach() -> None:
    """Of each other, and of the edges between them none ends at another atom."""
    room = Extent(40, 1000, 2)
    positions = blank_positions(room.nodes, CUTOFF, torch.zeros(1, dtype=torch.float32))
    receiver, sender = blank_edges(room, torch.zeros(1, dtype=torch.int64))
    assert float((positions[receiver] - positions[sender]).norm(dim=1).min()) >= 2 * CUTOFF
    assert int(torch.cat([receiver, sender]).min()) == room.nodes - num_blank(room.nodes)
    counts = torch.bincount(receiver)[-num_blank(room.nodes) :]
    assert int(counts.max() - counts.min()) <= 1


def test_what_a_larger_batch_left_is_blank_again() -> None:
    fields = {"batch": Field("nodes"), "edge_index": Field("edges", dim=1), "ptr": Field("structures", more=1)}
    blank = {"batch": torch.full((6,), 2), "edge_index": torch.full((2, 5), 5), "ptr": torch.full((4,), 6)}
    memory = PaddedBatch(blank, fields)
    for nodes, edges in ((4, 5), (2, 1)):
        inputs = {
            "batch": torch.zeros(nodes, dtype=torch.int64),
            "edge_index": torch.ones(2, edges, dtype=torch.int64),
            "ptr": torch.tensor([0, nodes]),
        }
        memory.fill(Batch(inputs, Extent(nodes, edges, 1)))
        assert memory.inputs["batch"].tolist() == [0] * nodes + [2] * (6 - nodes)
        assert memory.inputs["edge_index"][0].tolist() == [1] * edges + [5] * (5 - edges)
        assert memory.inputs["ptr"].tolist() == [0, nodes, 6, 6]

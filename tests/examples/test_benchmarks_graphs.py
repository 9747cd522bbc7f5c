"""Graphs of the benchmarks: as large, and of the kind, that their names say."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from eqaccel.benchmarks.graphs import make_graph

pytestmark = pytest.mark.skipif(find_spec("scipy") is None, reason="the graphs of the benchmarks need scipy")


@pytest.mark.parametrize(
    ("name", "nodes", "edges"),
    [
        ("carbon", 1000, (150_000, 165_000)),
        ("dhfr", 1800, (52_000, 60_000)),
        ("covid", 23000, (130_000, 142_000)),
        ("covid-morton", 23000, (130_000, 142_000)),
        ("water", 5184, (420_000, 450_000)),
        ("ring-64x60", 64, (3839, 3841)),
    ],
)
def test_graphs_have_the_sizes_they_are_named_for(name, nodes, edges):
    graph = make_graph(name)
    assert graph.num_nodes == nodes
    assert edges[0] < graph.num_edges < edges[1]
    order = graph.receiver * nodes + graph.sender
    assert bool((order.diff() > 0).all()), "sorted, and no edge twice"
    assert torch.equal((graph.sender * nodes + graph.receiver).sort().values, order), "symmetric"


def test_hub_has_as_many_edges_as_its_even_counterpart():
    hub, even = make_graph("hub"), make_graph("hub-even")
    assert hub.num_edges == even.num_edges
    assert hub.receiver.bincount().max() == hub.sender.bincount().max() == 20_000
    assert even.receiver.bincount().unique().tolist() == [100]


def test_morton_order_brings_neighbours_together():
    distance = [
        float((g.sender - g.receiver).abs().double().mean()) for g in map(make_graph, ("covid", "covid-morton"))
    ]
    assert distance[1] < distance[0] / 4


def test_graphs_by_number_of_neighbours():
    for name in ("local-300x60", "ring-300x60"):
        assert torch.equal(make_graph(name).receiver.bincount(), torch.full((300,), 60))
    for wrong in ("nowhere", "hub-morton", "radius-morton", "ring", "carbon-10x2"):
        with pytest.raises(ValueError, match=r"graph: expected one of .*ring-NxD, got"):
            make_graph(wrong)

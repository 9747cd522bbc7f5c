"""The benchmarks run at tiny sizes, check what they time, and write what they promise."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from eqaccel.plan import Direction
from eqaccel.testing import reference

BENCHMARKS = Path(__file__).resolve().parents[1] / "examples" / "benchmarks"
TINY = ["--device", "cpu", "--threads", "1", "--repetitions", "3"]

needs_scipy = pytest.mark.skipif(find_spec("scipy") is None, reason="the graphs of the benchmarks need scipy")


@pytest.fixture(autouse=True)
def _benchmarks_on_path(monkeypatch):
    threads = torch.get_num_threads()
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield
    torch.set_num_threads(threads)


@needs_scipy
def test_conv_writes_its_results(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    import conv

    files = {"json": tmp_path / "conv.json", "markdown": tmp_path / "conv.md", "plot": tmp_path / "conv.png"}
    arguments = [text for kind, path in files.items() for text in (f"--{kind}", str(path))]
    case = ["--problems", "tiny", "--graphs", "local-12x4,radius-40x8", "--compare", "e3nn,oeq", "--dtype", "float64"]
    results = conv.main([*TINY, *case, *arguments])

    written = json.loads(files["json"].read_text())
    assert written == json.loads(json.dumps(results))
    assert {"device", "versions", "commit", "date", "threads"} <= written["environment"].keys()
    assert written["roofline"]["bandwidth_gb_s"] > 0.1
    assert written["roofline"]["fma_peak_gf_s"] > 0.1
    assert files["plot"].read_bytes().startswith(b"\x89PNG")
    assert files["markdown"].read_text() in capsys.readouterr().out

    own = [row for row in written["rows"] if row["implementation"] == "eqaccel (ir_mul)"]
    assert [(row["graph"], row["nodes"]) for row in own] == [("local-12x4", 12), ("radius-40x8", 40)]
    for row in own:
        assert row["error"] < 1e-13
        for direction in ("forward", "backward", "double_backward"):
            assert row[direction]["ratio"] == 1
            assert row[direction]["of_memory"] > 0
            assert row[direction]["median_ms"] >= row[direction]["min_ms"] > 0


@needs_scipy
def test_what_cannot_be_timed_says_so(monkeypatch):
    import conv
    import peers

    def missing(*_):
        raise ImportError("No module named 'missing'")

    def wrong(spec, dtype, device):
        right = peers.CONTENDERS["eqaccel"]["eqaccel (mul_ir)"](spec, dtype, device)
        return peers.Contender(lambda edges: lambda x, y, w: 1.001 * right.bind(edges)(x, y, w), "mul_ir")

    def broken(spec, dtype, device):
        raise RuntimeError("no kernel image\nsecond line")

    for name, factory in (("missing", missing), ("wrong", wrong), ("broken", broken)):
        monkeypatch.setitem(peers.CONTENDERS, name, {name: factory})
    case = ["--problems", "tiny", "--graphs", "local-12x4", "--directions", "forward"]
    results = conv.main([*TINY, *case, "--compare", "missing,wrong,broken"])
    rows = {row["implementation"]: row for row in results["rows"]}
    assert "not installed" in rows["missing"]["note"]
    assert "wrong numbers" in rows["wrong"]["note"]
    assert rows["broken"]["note"] == "RuntimeError: no kernel image"
    assert not any("forward" in rows[name] for name in ("missing", "wrong", "broken"))


@needs_scipy
@pytest.mark.parametrize(
    ("name", "nodes", "edges"),
    [("carbon", 1000, (150_000, 165_000)), ("dhfr", 1800, (52_000, 60_000)), ("covid", 23000, (130_000, 142_000))],
)
def test_graphs_have_the_sizes_they_are_named_for(name, nodes, edges):
    from graphs import make_graph

    graph = make_graph(name)
    assert graph.num_nodes == nodes
    assert edges[0] < graph.num_edges < edges[1]
    order = graph.receiver * nodes + graph.sender
    assert bool((order.diff() > 0).all()), "sorted, and no edge twice"
    assert torch.equal((graph.sender * nodes + graph.receiver).sort().values, order), "symmetric"


@needs_scipy
def test_local_graph_has_the_degree_asked_for():
    from graphs import make_graph

    graph = make_graph("local-300x60")
    assert torch.equal(graph.receiver.bincount(), torch.full((300,), 60))
    with pytest.raises(ValueError, match="local-NxD"):
        make_graph("nowhere")


@needs_scipy
def test_layouts_agree_with_the_reference():
    from peers import feature_order
    from problems import PROBLEMS

    spec = PROBLEMS["nequip-water"].spec
    torch.manual_seed(0)
    x, y, w = (torch.randn(3, width, dtype=torch.float64) for width in (spec.x_dim, spec.y_dim, spec.weight_numel))
    on_x, on_z = (feature_order(irreps, "ir_mul") for irreps in (spec.irreps_in1, spec.irreps_out))
    result = reference(spec, x[:, on_x], y, w, layout="ir_mul")
    torch.testing.assert_close(result, reference(spec, x, y, w)[:, on_z])


def test_floor_counts_every_operand_once():
    from problems import PROBLEMS
    from roofline import floor_bytes

    spec = PROBLEMS["mace-large"].spec
    forward, backward, double = (floor_bytes(spec, 1000, 158_000, direction, 4) for direction in Direction)
    assert forward == 4 * (1000 * (1152 + 9088) + 158_000 * (16 + 2176))
    assert backward == 2 * forward - 4 * 1000 * 9088
    assert double == forward + backward


@pytest.mark.slow
def test_compile_times_are_cold_then_warm():
    from compile_times import cold_and_warm

    found = cold_and_warm(["tiny"], "cpu", None, "float32")
    assert [kernel["direction"] for kernel in found["cold"]["kernels"]] == ["forward", "backward"]
    assert not any(kernel["cached"] for kernel in found["cold"]["kernels"])
    assert all(kernel["cached"] for kernel in found["warm"]["kernels"])
    assert found["warm"]["compile_s"] < found["cold"]["compile_s"]


@pytest.mark.slow
def test_model_compares_patched_with_unpatched(tmp_path):
    pytest.importorskip("mace")
    pytest.importorskip("ase")
    import model

    small = ["--atoms", "8", "--elements", "8", "--channels", "4", "--backends", "none", "--dtype", "float64"]
    results = model.main([*TINY, *small, "--json", str(tmp_path / "model.json")])
    assert json.loads((tmp_path / "model.json").read_text())["atoms"] == 8
    assert results["force_difference"] < 1e-11
    plain, fused = results["rows"]
    assert plain["call"]["ratio"] == pytest.approx(plain["call"]["median_ms"] / fused["call"]["median_ms"])
    for row in (plain, fused):
        assert row["convolution_share"] > 0
        assert row["backward"]["median_ms"] > 0

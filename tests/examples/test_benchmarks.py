"""The benchmarks run at tiny sizes, check what they time, and write what they promise."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from folders import EXAMPLES
from patch_checks import RELATIVE

from eqaccel import PolynomialSpec, TensorProductSpec, WignerConvention
from eqaccel.codegen import Direction
from eqaccel.families.polynomial import Term
from eqaccel.testing import reference

BENCHMARKS = EXAMPLES / "benchmarks"
TINY = ["--device", "cpu", "--threads", "1", "--repetitions", "3"]
OUTPUTS = {"json": ".json", "markdown": ".md", "plot": ".png"}
CASE = ["--problems", "tiny", "--graphs", "local-12x4"]

pytestmark = pytest.mark.skipif(find_spec("scipy") is None, reason="the graphs of the benchmarks need scipy")


@pytest.fixture(autouse=True)
def _threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _instant_roofline(monkeypatch):
    from eqaccel.benchmarks import roofline, suite

    monkeypatch.setattr(suite, "measure_roofline", lambda *_: roofline.Roofline(1e10, 1e11))


def bench(*arguments):
    """Runs `python -m eqaccel bench` with these arguments."""
    from eqaccel.benchmarks.command import main

    assert main([str(argument) for argument in arguments]) == 0


def outputs(folder, name):
    return [text for kind, end in OUTPUTS.items() for text in (f"--{kind}", folder / f"{name}{end}")]


def test_kernels_write_their_results(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    case = ["--problems", "tiny", "--graphs", "local-12x4,radius-40x8", "--compare", "e3nn,oeq", "--dtype", "float64"]
    bench("kernels", *TINY, *case, *outputs(tmp_path, "result"))

    written = json.loads((tmp_path / "result.json").read_text())
    assert {"device", "versions", "commit", "date", "threads"} <= written["environment"].keys()
    for name in ("result.png", "result_roofline.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "result.md").read_text() in capsys.readouterr().out

    own = [row for row in written["rows"] if row["implementation"] == "eqaccel (ir_mul)"]
    assert [(row["graph"], row["nodes"]) for row in own] == [("local-12x4", 12), ("radius-40x8", 40)]
    for row in own:
        assert row["error"] < 450 * sys.float_info.epsilon  # sums of some ten terms, the largest of which do not cancel
        for direction in ("forward", "backward", "double_backward"):
            assert row[direction]["ratio"] == 1
            assert row[direction]["of_memory"] > 0
            assert row[direction]["median_ms"] >= row[direction]["min_ms"] > 0


RESULTS = BENCHMARKS / "results"


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_results_of_the_readme_are_reported(file: Path) -> None:
    from eqaccel.benchmarks.command import BENCHMARKS
    from eqaccel.benchmarks.report import load

    results = load([file])
    assert results["rows"] == json.loads(file.read_text())["rows"]
    assert "|" in BENCHMARKS[results["benchmark"]].compact(results)
    assert file.with_suffix(".md").is_file()


def test_picture_of_graphs_keeps_problems_apart(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from eqaccel.benchmarks import pictures
    from eqaccel.benchmarks.report import load

    drawn, bars = [], pictures._bars
    monkeypatch.setattr(pictures, "_bars", lambda *arguments: drawn.append(arguments) or bars(*arguments))
    results = load([RESULTS / "graphs_h200_float32.json"])
    pictures.by_graph(results, tmp_path / "graphs.png")
    assert len(drawn) == 3 * len({row["problem"] for row in results["rows"]})
    for _, graphs, series, floors, _ in drawn:
        assert len(series["eqaccel"]) == len(floors) == len(graphs)
        assert all(floor < cost for floor, cost in zip(floors, series["eqaccel"], strict=True))


def test_picture_of_scaling_keeps_problems_apart(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from eqaccel.benchmarks import pictures
    from eqaccel.benchmarks.report import load

    figures, save = [], pictures._save
    monkeypatch.setattr(pictures, "_save", lambda *arguments: figures.append(arguments[0]) or save(*arguments))
    results = load([RESULTS / "scaling_h200_float32.json"])
    results["rows"] += [{**row, "problem": "another"} for row in results["rows"]]
    pictures.scaling(results, tmp_path / "scaling.png")
    panels = figures[0].axes
    assert len(panels) == 2 * 3
    for axes in panels:
        lines = [list(line.get_xdata()) for line in axes.get_lines()]
        assert len(lines) > 1  # implementations and the floor
        assert all(edges == sorted(set(edges)) for edges in lines)


def test_files_that_are_no_results_are_named(tmp_path, capsys):
    from eqaccel.benchmarks.command import main

    (tmp_path / "text.json").write_text("no results")
    for name, message in (("missing.json", "No such file"), ("text.json", "Expecting value")):
        assert main(["report", str(tmp_path / name)]) == 1
        error = capsys.readouterr().err
        assert error.startswith("eqaccel bench report: expected files of results that belong together: ")
        assert message in error


def test_pieces_join_and_are_reported_again(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    pieces = []
    for graph in ("local-12x4", "ring-21x20"):
        pieces.append(tmp_path / f"{graph}.json")
        case = ["--problems", "tiny", "--graphs", graph, "--directions", "forward", "--compare", "none"]
        bench("kernels", *TINY, *case, "--json", pieces[-1])
    bench("report", *pieces, pieces[0], *outputs(tmp_path, "all"))
    joined = json.loads((tmp_path / "all.json").read_text())
    assert [row["graph"] for row in joined["rows"]] == ["local-12x4"] * 2 + ["ring-21x20"] * 2
    assert (tmp_path / "all.png").stat().st_size > 0
    assert "double backward" not in capsys.readouterr().out

    from eqaccel.benchmarks.report import heading, load

    assert not any("commit" in row for row in joined["rows"])
    old = json.loads(pieces[1].read_text())
    old["environment"]["commit"] = "0ldc0de"
    pieces[1].write_text(json.dumps(old))
    (tmp_path / "mixed.json").write_text(json.dumps(load([pieces[1], pieces[0]])))
    mixed = load([tmp_path / "mixed.json", pieces[0]])
    assert [row.get("commit") for row in mixed["rows"]] == ["0ldc0de"] * 2 + [None] * 2
    assert f"commit {mixed['environment']['commit']}; of 0ldc0de: tiny" in heading(mixed)
    assert not any("commit" in row for row in load([pieces[0], pieces[1]])["rows"][2:])

    pieces[0].write_text(json.dumps(joined | {"dtype": "float64"}))
    with pytest.raises(ValueError, match="expected files of one dtype, got float32, float64"):
        load(pieces)


def test_what_cannot_be_timed_says_so(monkeypatch, tmp_path):
    from eqaccel.benchmarks import peers
    from eqaccel.benchmarks.contender import Contender

    right = peers.CONVOLUTIONS["eqaccel"]["eqaccel (mul_ir)"]

    def missing(*_):
        raise ImportError("No module named 'missing'")

    def wrong(spec, dtype, device):
        product = right(spec, dtype, device)
        return Contender(lambda edges: lambda x, y, w: 1.001 * product.bind(edges)(x, y, w), "mul_ir")

    def wrong_when_large(spec, dtype, device):
        product = right(spec, dtype, device)
        factor = {24: 1.0}  # nodes of the graph that derivatives are checked on
        return Contender(
            lambda edges: lambda x, y, w: factor.get(edges.num_nodes, 1.001) * product.bind(edges)(x, y, w), "mul_ir"
        )

    def broken(spec, dtype, device):
        raise RuntimeError("no kernel image\nsecond line")

    factories = {"missing": missing, "wrong": wrong, "wrong_when_large": wrong_when_large, "broken": broken}
    for name, factory in factories.items():
        monkeypatch.setitem(peers.CONVOLUTIONS, name, {name: factory})
    compare = ["--compare", ",".join(factories), "--directions", "forward"]
    bench("kernels", *TINY, *CASE, *compare, "--json", tmp_path / "result.json")
    rows = {row["implementation"]: row for row in json.loads((tmp_path / "result.json").read_text())["rows"]}
    assert "not installed" in rows["missing"]["note"]
    assert "wrong numbers: " in rows["wrong"]["note"]
    assert "wrong numbers on this graph: " in rows["wrong_when_large"]["note"]
    assert rows["broken"]["note"] == "RuntimeError: no kernel image"
    assert not any("forward" in rows[name] for name in factories)


def test_contenders_may_have_the_signs_of_another_e3nn():
    from dataclasses import replace

    from eqaccel.benchmarks import graphs, peers
    from eqaccel.benchmarks.contender import Truth

    def spec(convention=None):
        return TensorProductSpec("3x1o", "2e", "2x2o", [(0, 0, 0, "uvw")], convention=convention)

    truth = Truth(spec(), graphs.batch(5), torch.float64, "cpu")
    for convention in WignerConvention:
        own = peers._eqaccel_batch(spec(convention), torch.float64, "cpu", layout="mul_ir")
        assert truth.error(replace(own, convention=convention)) < 1e-14
        assert truth.error(own) == pytest.approx(0 if convention is WignerConvention.installed() else 2)


def test_a_limit_of_time_is_kept(tmp_path):
    bench("kernels", *TINY, *CASE, "--time-limit", "0", "--json", tmp_path / "result.json")
    (row,) = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert row["note"] == "not begun within 0 s"
    bench("kernels", *TINY, *CASE, "--compare", "none", "--json", tmp_path / "later.json")
    bench("report", tmp_path / "later.json", tmp_path / "result.json", "--json", tmp_path / "both.json")
    both = json.loads((tmp_path / "both.json").read_text())
    assert [row["implementation"] for row in both["rows"]] == ["eqaccel (ir_mul)", "eqaccel (mul_ir)"]


def test_batch_takes_products_of_other_modes(tmp_path):
    case = ["--problems", "tiny,diffdock-l1", "--rows", "20", "--compare", "e3nn"]
    bench("batch", *TINY, *case, "--json", tmp_path / "result.json")
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert [(row["problem"], "forward" in row) for row in rows] == [("tiny", True)] * 3 + [("diffdock-l1", True)] * 3


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("graphs", ["--graphs", "ring-21x20,local-12x4", "--problems", "tiny"], "most neighbours"),
        ("scaling", ["--edges", "1e3,2e3", "--problems", "tiny", "--compare", "none"], "ring-61x60 61/3660"),
        ("overhead", ["--problems", "tiny", "--compare", "none", "--calls", "5"], "torch.add"),
        ("matrices", ["--layers", "mp0-hidden,nequip-l", "--rows", "100"], "100 x 1312 x 128"),
        ("modules", ["--modules", "gates,harmonics", "--rows", "5,9", "--repetitions", "1"], "| harmonics | 9 "),
    ],
)
def test_other_benchmarks_run(name, options, expected, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    bench(name, *TINY, *options, *outputs(tmp_path, name))
    assert expected in capsys.readouterr().out
    assert (tmp_path / f"{name}.png").stat().st_size > 0


def test_the_command_line_without_what_benchmarks_need():
    """The help comes, and a run says what to install."""
    code = """
import contextlib, io, json, sys
class Missing:
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] in ("ase", "matplotlib", "scipy", "tqdm"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing)
from eqaccel.__main__ import main
for arguments in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(["bench", *arguments])
        except SystemExit as end:
            status = end.code
    print(json.dumps([status, out.getvalue(), err.getvalue()]))
"""
    run = ("kernels", *TINY, "--problems", "mp0-first", "--graphs", "water", "--compare", "none")
    commands = json.dumps([["--help"], ["kernels", "--help"], run])
    done = subprocess.run([sys.executable, "-c", code, commands], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    *helps, (status, _, error) = map(json.loads, done.stdout.splitlines())
    for returned, text, complaints in helps:
        assert (returned, complaints) == (0, "")
        assert "usage: eqaccel bench" in text
    assert status == 1
    assert "Traceback" not in error
    assert "pip install ase matplotlib scipy tqdm" in error


def test_the_command_line_refuses_unknown_names(capsys):
    from eqaccel.benchmarks.command import main

    for option, name in (("--graphs", "nowhere"), ("--problems", "nothing"), ("--compare", "nobody")):
        with pytest.raises(SystemExit):
            main(["kernels", option, name])
        message = capsys.readouterr().err
        assert "expected " in message
        assert name in message


def test_standings_take_the_best_variants():
    from eqaccel.benchmarks.report import compact_table

    def row(graph, implementation, milliseconds, share):
        found = {"median_ms": milliseconds, "of_memory": share}
        return {"graph": graph, "problem": "p", "implementation": implementation, "note": "", "forward": found}

    rows = [
        row("g", "eqaccel (ir_mul)", 2.0, 0.5),
        row("g", "eqaccel (mul_ir)", 3.0, 0.3),
        row("g", "OpenEquivariance atomic (ir_mul)", 5.0, 0.2),
        row("g", "cuEquivariance", 9.0, 0.1),
        row("h", "eqaccel (ir_mul)", 1.0, 0.9),
    ]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in compact_table({"rows": rows}).splitlines()]
    assert ["p", "2.000, 50 %, **2.5x** OEQ"] in lines
    assert ["g", "50 %, **2.5x** (least 2.5x)"] in lines
    assert ["h", "90 %"] in lines


@pytest.mark.parametrize(
    ("name", "paths", "weights"),
    [
        ("mace-large", 17, 2176),
        ("mp0-large-second", 17, 2176),
        ("mp0-second", 10, 1280),
        ("nequip-l", 23, 1312),
        ("nequip-xl", 42, 3616),
        ("nequip-benzene", 68, 4352),
        ("sevennet-l3i5", 34, 1760),
    ],
)
def test_problems_are_those_of_the_models(name, paths, weights):
    from eqaccel.benchmarks.problems import PROBLEMS

    spec = PROBLEMS[name].spec
    assert (len(spec.paths), spec.weight_numel) == (paths, weights)


def test_peers_are_given_the_products_of_the_problems():
    from eqaccel.benchmarks.contender import instructions
    from eqaccel.benchmarks.problems import PROBLEMS

    for spec in (problem.spec for problem in PROBLEMS.values()):
        assert TensorProductSpec(spec.irreps_in1, spec.irreps_in2, spec.irreps_out, instructions(spec)) == spec


def test_layouts_agree_with_the_reference():
    from eqaccel.benchmarks.contender import feature_order
    from eqaccel.benchmarks.problems import PROBLEMS

    spec = PROBLEMS["nequip-water"].spec
    torch.manual_seed(0)
    x, y, w = (torch.randn(3, width, dtype=torch.float64) for width in (spec.x_dim, spec.y_dim, spec.weight_numel))
    on_x, on_z = (feature_order(irreps, "ir_mul") for irreps in (spec.irreps_in1, spec.irreps_out))
    result = reference(spec, x[:, on_x], y, w, layout="ir_mul")
    torch.testing.assert_close(result, reference(spec, x, y, w)[:, on_z])


def test_floor_counts_every_operand_once():
    from eqaccel.benchmarks.problems import PROBLEMS
    from eqaccel.benchmarks.roofline import floor_bytes

    spec = PROBLEMS["mace-large"].spec
    forward, backward, double, triple = (floor_bytes(spec, 1000, 158_000, direction, 4) for direction in Direction)
    assert forward == 4 * (1000 * (1152 + 9088) + 158_000 * (16 + 2176))
    assert backward == 2 * forward - 4 * 1000 * 9088
    assert double == forward + backward
    assert triple == double + backward


def test_repetitions_fit_the_budget():
    from eqaccel.benchmarks.timing import allowed

    assert allowed(20, budget=1.0, seconds=0.001) == 20
    assert allowed(20, budget=1.0, seconds=0.1) == 10
    assert allowed(20, budget=1.0, seconds=0.5) == 3
    assert allowed(20, budget=1.0, seconds=1.5) == 1


def test_the_limits_of_this_machine_can_be_measured():
    from eqaccel.benchmarks.roofline import measure_roofline

    found = measure_roofline("cpu", torch.float32, 1).to_json()
    assert found["bandwidth_gb_s"] > 0.1
    assert found["fma_peak_gf_s"] > 0.1


def test_summary_shows_where_eqaccel_stands(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import summary

    results, readme, docs = tmp_path / "results", tmp_path / "README.md", tmp_path / "docs" / "performance.md"
    docs.parent.mkdir()
    for text in (readme, docs):
        text.write_text(f"before\n{summary.BEGIN}\nold\n{summary.END}\nafter\n")
    bench("kernels", *TINY, *CASE, "--compare", "none", "--json", results / "a.json", "--markdown", results / "a.md")
    for name in ("models_cpu_float32.json", "step_cpu_float32.json"):
        shutil.copy(RESULTS / name, results)
    monkeypatch.setattr(summary, "README", readme)
    monkeypatch.setattr(summary, "DOCS", docs)
    monkeypatch.setattr(summary, "RESULTS", results)
    summary.main()
    for text in (readme.read_text(), docs.read_text()):
        assert text.startswith("before\n")
        assert text.endswith("after\n")
        assert "old" not in text
    assert "MACE mp0-medium, 216 atoms of carbon" in readme.read_text()
    assert "MACE mp0-medium, 216 atoms, 34128 edges" in docs.read_text()
    assert "## Fused convolution" in docs.read_text()
    assert "[everything](../results/a.md)" in docs.read_text()
    assert "Fused convolution" not in readme.read_text()


def test_texts_show_the_results_that_are_kept(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import summary

    kept = {text: text.read_text() for text in (summary.README, summary.DOCS)}
    written = {}
    monkeypatch.setattr(summary, "write", lambda text, parts: written.__setitem__(text, "\n\n".join(parts)))
    summary.main()
    for text, part in written.items():
        assert part in kept[text], f"{text.name}: run examples/benchmarks/summary.py"


def test_bench_is_a_command_of_eqaccel(tmp_path):
    command = [sys.executable, "-m", "eqaccel", "bench", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    kinds = "kernels batch graphs scaling overhead matrices modules models step report"
    assert all(name in shown for name in kinds.split())


def test_a_model_whose_library_is_missing_says_what_to_use(monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setitem(sys.modules, "eqaccel.benchmarks.nequip_like", None)
    bench("models", *TINY, "--models", "nequip-m,nequip-l", *outputs(tmp_path, "missing"))
    missing = json.loads((tmp_path / "missing.json").read_text())
    assert [row["model"] for row in missing["rows"]] == ["nequip-m", "nequip-l"]
    assert all("use an environment with nequip: ./run shell nequip" in row["note"] for row in missing["rows"])

    found = {"model": "nequip-m", "atoms": 3, "edges": 6, "implementation": "eqaccel", "note": ""}
    (tmp_path / "found.json").write_text(json.dumps(missing | {"rows": [found]}))
    bench("report", tmp_path / "missing.json", tmp_path / "found.json", "--json", tmp_path / "both.json")
    both = json.loads((tmp_path / "both.json").read_text())
    assert [(row["model"], row["atoms"]) for row in both["rows"]] == [("nequip-l", None), ("nequip-m", 3)]


@pytest.mark.slow
def test_compile_times_are_cold_then_warm():
    from eqaccel.benchmarks.compile_times import cold_and_warm
    from eqaccel.benchmarks.problems import PROBLEMS

    specs = [PROBLEMS["tiny"].spec, PolynomialSpec(2, 1, 1, (Term(0, 0, (0, 1), 2.0),))]
    found = cold_and_warm(specs, "cpu", None, "float32")
    assert [(kernel["spec"], kernel["direction"]) for kernel in found["cold"]["kernels"]] == [
        (number, direction) for number in (0, 1) for direction in ("forward", "backward")
    ]
    assert not any(kernel["cached"] for kernel in found["cold"]["kernels"])
    assert all(kernel["cached"] for kernel in found["warm"]["kernels"])
    assert found["warm"]["compile_s"] < found["cold"]["compile_s"]


@pytest.mark.slow
def test_models_compare_patched_with_unpatched(tmp_path):
    pytest.importorskip("mace")
    pytest.importorskip("ase")
    small = ["--atoms", "8", "--elements", "6", "--channels", "4", "--backends", "none", "--dtype", "float64"]
    bench("models", *TINY, *small, "--models", "mp0-medium", "--compare", "none", "--json", tmp_path / "result.json")
    results = json.loads((tmp_path / "result.json").read_text())
    plain, fused = results["rows"]
    assert fused["force_difference"] < RELATIVE
    assert plain["call"]["ratio"] == pytest.approx(plain["call"]["median_ms"] / fused["call"]["median_ms"])
    for row in (plain, fused):
        assert row["atoms"] == 8
        assert row["convolution_share"] > 0
        assert row["backward"]["median_ms"] > 0


@pytest.mark.slow
def test_model_layers_are_the_problems_they_are_said_to_be():
    pytest.importorskip("mace")
    from eqaccel.benchmarks.mace_like import MODELS, build_model
    from eqaccel.benchmarks.problems import PROBLEMS

    model = build_model(torch.float64, MODELS["large"])
    specs = [TensorProductSpec.from_e3nn(block.conv_tp) for block in model.interactions]
    problems = [PROBLEMS[name].spec for name in ("mp0-first", "mp0-large-second")]
    for spec, problem in zip(specs, problems, strict=True):
        assert (spec.weight_numel, spec.irreps_out) == (problem.weight_numel, problem.irreps_out)

"""Times whole MACE models, energy and forces, before and after eqaccel.patch(model), on diamond crystals.

The models have random weights and frozen parameters. Beside the whole call this times the convolutions alone, by
replaying them on what they were called with, and the seconds that their kernels take to compile with an empty and with
a filled cache. On a GPU it adds the time of the kernels of a call, and the call replayed from a CUDA graph.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from eqaccel.benchmarks import pictures, report, suite
from eqaccel.benchmarks.compile_times import cold_and_warm
from eqaccel.benchmarks.timing import Timing, describe, free_memory, measure
from torch import Tensor

Call = Callable[[], object]

# e3nn keeps some of its constants in float32, and the peers do not.
_FORCE_LIMITS = {torch.float32: 1e-4, torch.float64: 1e-6}
_WORDS = {"cue": "cuEquivariance", "oeq": "OpenEquivariance"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    report.add_arguments(parser)
    parser.add_argument("--models", type=suite.names(["mp0-medium", "large"]), default="mp0-medium")
    parser.add_argument("--atoms", type=suite.names(None), help="default: 64,1000 or, on a CPU, 216")
    parser.add_argument("--elements", type=int, help="instead of those of the model")
    parser.add_argument("--channels", type=int, help="instead of those of the model")
    parser.add_argument("--compare", type=suite.names([*_WORDS, "none"]), default="cue,oeq")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--budget", type=float, help="seconds for each thing that is timed (2 or 60)")
    parser.add_argument("--backends", default="cpu,cuda", help="backends whose compiler is timed, or none")
    parser.add_argument("--arch", default="sm_90", help="architecture to compile for on cuda")


def run(arguments: argparse.Namespace) -> report.Results:
    """Every model on every crystal, plain, patched and converted."""
    from eqaccel.benchmarks.mace_like import MODELS

    gpu = arguments.device == "cuda"
    torch.set_num_threads(arguments.threads)
    arguments.budget = arguments.budget or (2.0 if gpu else 60.0)
    results = report.new_results("models", arguments) | {"compile": {}}
    sizes = [int(atoms) for atoms in arguments.atoms or (["64", "1000"] if gpu else ["216"])]
    with suite.progress(len(arguments.models) * len(sizes)) as bar:
        for name in arguments.models:
            shape = MODELS[name]
            sizes_given = {"elements": arguments.elements, "channels": arguments.channels}
            shape = replace(shape, **{key: value for key, value in sizes_given.items() if value})
            for atoms in sizes:
                suite.describe_step(bar, f"{name}, {atoms} atoms")
                results["rows"] += [{"model": name} | row for row in _time_model(shape, atoms, arguments)]
                bar.update()
    for backend in filter(lambda name: name != "none", arguments.backends.split(",")):
        arch = None if backend == "cpu" else arguments.arch
        layers = list(dict.fromkeys(layer for name in arguments.models for layer in MODELS[name].layers))
        try:
            found = cold_and_warm(layers, backend, arch, arguments.dtype)
        except RuntimeError as error:
            found = {"note": describe(error)}
        results["compile"][backend if arch is None else f"{backend} {arch}"] = found
    return results


def _time_model(shape: Any, atoms: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each variant of one model on one crystal: the plain one first, then the patched one."""
    from eqaccel.benchmarks import mace_like

    dtype, device = getattr(torch, arguments.dtype), arguments.device
    free_memory()
    plain = mace_like.build_model(dtype, shape).to(device)
    crystal = mace_like.diamond(atoms)
    batch = mace_like.make_batch(plain, crystal, dtype, device)
    facts = {"atoms": len(crystal), "edges": batch["edge_index"].shape[1], "note": ""}
    rows: list[dict[str, Any]] = [facts | {"implementation": "e3nn"}]
    models = {"e3nn": plain}
    expected = _call(plain, batch)["forces"].detach()
    for name in ["eqaccel", *(_WORDS[word] for word in arguments.compare if word != "none")]:
        rows.append(facts | {"implementation": name})
        try:
            model = mace_like.VARIANTS[name](plain, device)
            forces = _call(model, batch)["forces"].detach()
        except Exception as failure:
            missing = isinstance(failure, ImportError)
            rows[-1]["note"] = f"not installed: {failure}" if missing else describe(failure)
            continue
        difference = float((forces - expected).abs().max() / expected.abs().max())
        rows[-1]["force_difference"] = difference
        if difference < _FORCE_LIMITS[dtype]:
            models[name] = model
        else:
            rows[-1]["note"] = f"other forces: relative difference {difference:.1e}"
    if "eqaccel" not in models:
        raise RuntimeError(f"the patched model does not work: {rows[1]['note']}")
    timings = _time_variants(models, batch, arguments)
    for row in rows:
        if device == "cuda" and row["implementation"] in models:
            row["device_ms"] = _device_milliseconds(lambda row=row: _call(models[row["implementation"]], batch))
        _add_timings(row, timings)
    for part in ("call", "graph", "forward", "backward"):
        own = rows[1].get(part, {}).get("median_ms")
        for row in rows:
            if own and "median_ms" in row.get(part, {}):
                row[part]["ratio"] = row[part]["median_ms"] / own
    return rows


def _time_variants(
    models: Mapping[str, torch.nn.Module], batch: Mapping[str, Tensor], arguments: argparse.Namespace
) -> dict[str, Timing | str]:
    """Times of the calls, of the convolutions alone and, on a GPU, of the calls replayed from CUDA graphs."""
    device, limits = arguments.device, (arguments.device, arguments.repetitions, arguments.budget)
    work = {f"{name} call": lambda model=model: lambda: _call(model, batch) for name, model in models.items()}
    timings = measure(work, *limits, torch.cuda.memory_allocated() if device == "cuda" else 0)
    inputs = _convolution_inputs(models["eqaccel"], batch)
    plain = [_e3nn_convolution(block.conv_tp) for block in models["e3nn"].interactions]
    # Each replay gets edges of its own, as the model does in each step.
    fused = [
        lambda x, y, w, edges, conv=block.conv_tp: conv(x, y, w, edges.clone())
        for block in models["eqaccel"].interactions
    ]
    parts = {
        f"{name} {part}": setup
        for name, convolutions in (("e3nn", plain), ("eqaccel", fused))
        for part, setup in _replays(convolutions, inputs).items()
    }
    timings |= measure(parts, *limits)
    inputs.clear()
    if device == "cuda":
        # Last, and the plain model after the others: a failed capture may leave torch's generators confused.
        captures = {f"{name} graph": lambda model=models[name]: _captured(model, batch) for name in [*models][::-1]}
        timings |= measure(captures, *limits)
    return timings


def _call(model: torch.nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Energy and forces from fresh tensors, as in every step of a simulation: edges are sorted anew each time."""
    return model({name: value.clone() for name, value in batch.items()}, compute_force=True)


def _captured(model: torch.nn.Module, batch: Mapping[str, Tensor]) -> Call:
    """The call as a CUDA graph, as one that replays it for every step would have it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            _call(model, batch)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _call(model, batch)
    return graph.replay


def _device_milliseconds(call: Call) -> float | None:
    """The sum of the times of all kernels of a call; None if they cannot be seen."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            call()
            torch.cuda.synchronize()
        kernels = [event for event in found.events() if event.device_type == DeviceType.CUDA]
    except (AssertionError, RuntimeError):
        return None
    return sum(event.time_range.elapsed_us() for event in kernels) / 1e3


def _convolution_inputs(patched: torch.nn.Module, batch: Mapping[str, Tensor]) -> list[tuple[Tensor, ...]]:
    """What each convolution is called with: node features, edge attributes, weights and edges."""
    inputs: list[tuple[Tensor, ...]] = []

    def keep(_: torch.nn.Module, arguments: tuple[Tensor, ...]) -> None:
        inputs.append(tuple(a.detach().clone().requires_grad_(a.requires_grad) for a in arguments))

    hooks = [block.conv_tp.register_forward_pre_hook(keep) for block in patched.interactions]
    _call(patched, batch)
    for hook in hooks:
        hook.remove()
    return inputs


def _replays(
    convolutions: Sequence[Callable[..., Tensor]], inputs: Sequence[tuple[Tensor, ...]]
) -> dict[str, Callable[[], Call]]:
    """What to time of the convolutions of all layers: forward, and backward for what the model needs gradients of."""

    def forward() -> Call:
        def run() -> object:
            with torch.no_grad():
                return [convolve(*arguments) for convolve, arguments in zip(convolutions, inputs, strict=True)]

        return run

    def backward() -> Call:
        outputs = [convolve(*arguments) for convolve, arguments in zip(convolutions, inputs, strict=True)]
        wanted = [[a for a in arguments if a.requires_grad] for arguments in inputs]
        work = [(z, variables, torch.randn_like(z)) for z, variables in zip(outputs, wanted, strict=True)]
        return lambda: [torch.autograd.grad(z, v, g, retain_graph=True) for z, v, g in work]

    return {"forward": forward, "backward": backward}


def _e3nn_convolution(product: torch.nn.Module) -> Callable[..., Tensor]:
    """Gather, tensor product and scatter as in MACE's interaction blocks."""
    from mace.tools.scatter import scatter_sum

    def convolve(node_feats: Tensor, edge_attrs: Tensor, weights: Tensor, edge_index: Tensor) -> Tensor:
        messages = product(node_feats[edge_index[0]], edge_attrs, weights)
        return scatter_sum(src=messages, index=edge_index[1], dim=0, dim_size=node_feats.shape[0])

    return convolve


def _add_timings(row: dict[str, Any], timings: Mapping[str, Timing | str]) -> None:
    """Puts the times of a row's implementation into it, and the share of the call that its convolutions have."""
    for part in ("call", "graph", "forward", "backward"):
        timing = timings.get(f"{row['implementation']} {part}")
        if timing is not None:
            row[part] = timing.to_json() if isinstance(timing, Timing) else {"note": timing}
    medians = [row.get(part, {}).get("median_ms") for part in ("call", "forward", "backward")]
    if None not in medians:
        row["convolution_share"] = (medians[1] + medians[2]) / medians[0]


def format_tables(results: report.Results) -> str:
    """Times of the models and of their convolutions, and of the compiler."""

    def cell(found: Mapping[str, Any]) -> str:
        return f"{found['median_ms']:.2f} ({found['ratio']:.2f}x)" if "ratio" in found else found.get("note", "-")

    gpu = results["environment"]["gpu"]
    lines = []
    for row in results["rows"]:
        cells = [f"{row['model']}, {row['atoms']}/{row['edges']}", row["implementation"], cell(row.get("call", {}))]
        if gpu:
            peak = row.get("call", {}).get("peak_bytes")
            cells += [cell(row.get("graph", {})), f"{row['device_ms']:.2f}" if row.get("device_ms") else "-"]
            cells.append(f"{peak / 1e9:.2f}" if peak else "-")
        cells += [cell(row.get(part, {})) for part in ("forward", "backward")]
        cells.append(f"{100 * row['convolution_share']:.0f} %" if "convolution_share" in row else "-")
        cells.append(f"{row['force_difference']:.0e}" if "force_difference" in row else "-")
        lines.append([*cells, row["note"]])
    header = ["model, atoms/edges", "implementation", "energy and forces, ms"]
    header += ["replayed, ms", "its kernels, ms", "peak memory, GB"] if gpu else []
    header += ["convolutions forward, ms", "backward, ms", "share of the call", "difference of forces", "note"]
    parts = ["In brackets: times that of eqaccel.", report.table(lines, header)]
    compiled = [
        [f"{backend} {state}", f"{found[state]['codegen_s']:.2f}", f"{found[state]['compile_s']:.2f}"]
        if "note" not in found
        else [backend, found["note"], "-"]
        for backend, found in results["compile"].items()
        for state in (("cold", "warm") if "note" not in found else ("",))
    ]
    if compiled:
        parts.append("Seconds to write and to compile the kernels of all layers, in a fresh process:")
        parts.append(report.table(compiled, ["cache", "write, s", "compile, s"]))
    return "\n\n".join(parts)


def compact(results: report.Results) -> str:
    """A line for each model and crystal, a column for each implementation."""
    names = list(dict.fromkeys(row["implementation"] for row in results["rows"]))
    cases: dict[str, dict[str, Any]] = {}
    for row in results["rows"]:
        case = f"MACE {row['model']}, {row['atoms']} atoms, {row['edges']} edges"
        cases.setdefault(case, {})[row["implementation"]] = row.get("call", {})

    def cell(found: Mapping[str, Any]) -> str:
        if "median_ms" not in found:
            return "-"
        return f"{found['median_ms']:.1f} ms" + (f" ({found['ratio']:.1f}x)" if found.get("ratio", 1) != 1 else "")

    lines = [[case, *(cell(found.get(name, {})) for name in names)] for case, found in cases.items()]
    return report.table(lines, ["energy and forces", *names])


def draw(results: report.Results, path: Path) -> list[Path]:
    """Bars of the whole call and of the convolutions."""
    cases = list(dict.fromkeys((row["model"], row["atoms"]) for row in results["rows"]))
    names = dict.fromkeys(row["implementation"] for row in results["rows"])
    known = {(row["model"], row["atoms"], row["implementation"]): row for row in results["rows"]}
    parts = {"call": "energy, forces", "graph": "replayed", "forward": "conv. forward", "backward": "conv. backward"}
    parts = {part: what for part, what in parts.items() if any(part in row for row in results["rows"])}
    groups = [f"{model} {atoms}: {what}" for model, atoms in cases for what in parts.values()]
    series = {
        name: [known[(*case, name)].get(part, {}).get("median_ms") for case in cases for part in parts]
        for name in names
    }
    return pictures.grouped(results, path, groups, series, "milliseconds", "MACE, energy and forces")

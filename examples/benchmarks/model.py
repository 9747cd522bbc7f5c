"""Times a whole MACE model, energy and forces, before and after eqaccel.patch(model), on a diamond crystal.

    python examples/benchmarks/model.py --device cpu --threads 2 --atoms 216

The model has the shape of MACE-MP-0 medium: 89 elements, 128x0e+128x1o, correlation 3, random weights, parameters
frozen. Beside the whole call it times the convolutions alone, by replaying them on what they were called with, and the
seconds that their kernels take to compile with an empty and with a filled cache.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import report
import torch
from compile_times import cold_and_warm
from mace.tools.scatter import scatter_sum
from mace_like import build_model, diamond, make_batch
from timing import Timing, describe, measure
from torch import Tensor

import eqaccel

LAYERS = ("mp0-first", "mp0-second")
"""The problems that the two interactions of the model are."""


def call(model: torch.nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Energy and forces from fresh tensors, as in every step of a simulation: edges are sorted anew each time."""
    return model({name: value.clone() for name, value in batch.items()}, compute_force=True)


def convolution_inputs(patched: torch.nn.Module, batch: Mapping[str, Tensor]) -> list[tuple[Tensor, ...]]:
    """What each convolution is called with: node features, edge attributes, weights and edges."""
    inputs: list[tuple[Tensor, ...]] = []

    def keep(_: torch.nn.Module, arguments: tuple[Tensor, ...]) -> None:
        inputs.append(tuple(a.detach().clone().requires_grad_(a.requires_grad) for a in arguments))

    hooks = [block.conv_tp.register_forward_pre_hook(keep) for block in patched.interactions]
    call(patched, batch)
    for hook in hooks:
        hook.remove()
    return inputs


def replays(
    convolutions: Sequence[Callable[..., Tensor]], inputs: Sequence[tuple[Tensor, ...]]
) -> dict[str, Callable[[], Callable[[], object]]]:
    """What to time of the convolutions of all layers: forward, and backward for what the model needs gradients of."""

    def forward() -> Callable[[], object]:
        def run() -> object:
            with torch.no_grad():
                return [convolve(*arguments) for convolve, arguments in zip(convolutions, inputs, strict=True)]

        return run

    def backward() -> Callable[[], object]:
        outputs = [convolve(*arguments) for convolve, arguments in zip(convolutions, inputs, strict=True)]
        wanted = [[a for a in arguments if a.requires_grad] for arguments in inputs]
        work = [(z, variables, torch.randn_like(z)) for z, variables in zip(outputs, wanted, strict=True)]
        return lambda: [torch.autograd.grad(z, v, g, retain_graph=True) for z, v, g in work]

    return {"forward": forward, "backward": backward}


def e3nn_convolution(product: torch.nn.Module) -> Callable[..., Tensor]:
    """Gather, tensor product and scatter as in MACE's interaction blocks."""

    def convolve(node_feats: Tensor, edge_attrs: Tensor, weights: Tensor, edge_index: Tensor) -> Tensor:
        messages = product(node_feats[edge_index[0]], edge_attrs, weights)
        return scatter_sum(src=messages, index=edge_index[1], dim=0, dim_size=node_feats.shape[0])

    return convolve


def time_models(arguments: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of both models and of their convolutions, and how well the models agree."""
    dtype, device = getattr(torch, arguments.dtype), arguments.device
    plain = build_model(dtype, arguments.elements, arguments.channels).to(device)
    patched = eqaccel.patch(copy.deepcopy(plain))
    atoms = diamond(arguments.atoms)
    batch = make_batch(plain, atoms, dtype, device)
    before, after = ({k: call(m, batch)[k].detach() for k in ("energy", "forces")} for m in (plain, patched))
    differences = {k: float((after[k] - before[k]).abs().max() / before[k].abs().max()) for k in before}
    facts = {
        "atoms": len(atoms),
        "edges": batch["edge_index"].shape[1],
        "force_difference": differences["forces"],
        "energy_difference": differences["energy"],
    }
    limit = {torch.float32: 1e-4, torch.float64: 1e-11}[dtype]
    if not facts["force_difference"] < limit:
        raise RuntimeError(f"the patched model gives other forces: relative difference {facts['force_difference']:.1e}")

    inputs = convolution_inputs(patched, batch)
    originals = [e3nn_convolution(block.conv_tp) for block in plain.interactions]
    # Each replay gets edges of its own, as the model does in each step.
    fused = [lambda x, y, w, edges, conv=block.conv_tp: conv(x, y, w, edges.clone()) for block in patched.interactions]
    work = {"e3nn call": lambda: lambda: call(plain, batch), "eqaccel call": lambda: lambda: call(patched, batch)}
    for name, convolutions in (("e3nn", originals), ("eqaccel", fused)):
        work |= {f"{name} {part}": setup for part, setup in replays(convolutions, inputs).items()}
    return facts | {"timings": measure(work, device, arguments.repetitions, arguments.budget)}


def summarise(timings: Mapping[str, Timing | str]) -> list[dict[str, Any]]:
    """A row for each of the two models."""
    rows = []
    for name in ("e3nn", "eqaccel"):
        row: dict[str, Any] = {"implementation": name}
        for part in ("call", "forward", "backward"):
            timing = timings[f"{name} {part}"]
            row[part] = timing.to_json() if isinstance(timing, Timing) else {"note": timing}
        medians = [row[part].get("median_ms") for part in ("call", "forward", "backward")]
        if None not in medians:
            row["convolution_share"] = (medians[1] + medians[2]) / medians[0]
        rows.append(row)
    for part in ("call", "forward", "backward"):
        times = [row[part].get("median_ms") for row in rows]
        if None not in times:
            rows[0][part]["ratio"], rows[1][part]["ratio"] = times[0] / times[1], 1.0
    return rows


def format_tables(results: Mapping[str, Any]) -> str:
    def cell(found: Mapping[str, Any]) -> str:
        return f"{found['median_ms']:.2f} ({found['ratio']:.2f}x)" if "ratio" in found else found.get("note", "-")

    lines = []
    for row in results["rows"]:
        share = f"{100 * row['convolution_share']:.0f} %" if "convolution_share" in row else "-"
        lines.append([row["implementation"], *(cell(row[part]) for part in ("call", "forward", "backward")), share])
    header = ["model", "energy and forces, ms", "convolutions forward, ms", "backward, ms", "share of the call"]
    parts = [
        report.heading(results),
        f"Diamond, {results['atoms']} atoms, {results['edges']} edges; relative difference of the forces "
        f"{results['force_difference']:.0e}. In brackets: times that of eqaccel.",
        report.table(lines, header),
        "Seconds to write and to compile the kernels of both layers, forward and backward, in a fresh process:",
    ]
    compiled = [
        [f"{backend} {state}", f"{found[state]['codegen_s']:.2f}", f"{found[state]['compile_s']:.2f}"]
        if "note" not in found
        else [backend, found["note"], "-"]
        for backend, found in results["compile"].items()
        for state in (("cold", "warm") if "note" not in found else ("",))
    ]
    return "\n\n".join([*parts, report.table(compiled, ["cache", "write, s", "compile, s"])])


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    report.add_arguments(parser)
    parser.add_argument("--atoms", type=int, default=216)
    parser.add_argument("--elements", type=int, default=89)
    parser.add_argument("--channels", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for each thing that is timed")
    parser.add_argument("--backends", default="cpu,cuda", help="backends whose compiler is timed, or none")
    parser.add_argument("--arch", default="sm_90", help="architecture to compile for on cuda")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    arguments = parse_arguments(argv)
    torch.set_num_threads(arguments.threads)
    measured = time_models(arguments)
    results = {
        "environment": report.environment(arguments.device, arguments.threads),
        "dtype": arguments.dtype,
        "rows": summarise(measured.pop("timings")),
        "compile": {},
    } | measured
    for backend in filter(lambda name: name != "none", arguments.backends.split(",")):
        arch = None if backend == "cpu" else arguments.arch
        try:
            found = cold_and_warm(LAYERS, backend, arch, arguments.dtype)
        except RuntimeError as error:
            found = {"note": describe(error)}
        results["compile"][backend if arch is None else f"{backend} {arch}"] = found
    report.publish(results, format_tables(results), arguments)
    if arguments.plot:
        groups = ["energy and forces", "convolutions, forward", "convolutions, backward"]
        parts = ("call", "forward", "backward")
        series = {row["implementation"]: [row[part].get("median_ms") for part in parts] for row in results["rows"]}
        title = f"MACE-MP-0-like, {results['atoms']} atoms, {results['dtype']}, {results['environment']['device']}"
        report.plot_bars(arguments.plot, groups, series, "milliseconds", title)
    return results


if __name__ == "__main__":
    main()
